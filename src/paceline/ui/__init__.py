"""The live page: a web server that shows a workspace.

`paceline ui` starts the server, which needs the extra `ui`.
"""
