"""What tests and doctests have in common: those of frameworks are collected only where they are asked for."""

FRAMEWORKS = "integrations"  # folders of src and tests


def pytest_ignore_collect(collection_path, config):
    """Leave their folders out where their marker is: importing alone takes long."""
    if FRAMEWORKS in collection_path.parts and "not frameworks" in config.option.markexpr:
        return True
    return None


def pytest_collection_modifyitems(items):
    """Mark them."""
    for item in items:
        if FRAMEWORKS in item.path.parts:
            item.add_marker("frameworks")
