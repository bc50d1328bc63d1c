"""The live page: a web server that shows a workspace.

`paceline ui` starts it; it needs the extra `ui`.
"""
