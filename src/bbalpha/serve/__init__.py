"""Models over HTTP: what `bbalpha serve` runs, and the web page that comes with it."""
