"""The live page: a web server that reads a workspace as it is. `paceline ui` starts it; it needs the extra `ui`."""
