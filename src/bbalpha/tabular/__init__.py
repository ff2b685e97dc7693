"""From a file to a model and back: what the command line, the report and the service do with tables."""
