"""The views of the pages, one module for each kind of page.

Views that read files are plain functions, which Starlette calls on other threads than the event loop's.
"""
