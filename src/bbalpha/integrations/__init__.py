"""Bridges to the frameworks people already use; each needs its extra."""
