"""How K passes run. Nothing here is API: the public modules beside this room are."""
