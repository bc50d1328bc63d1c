"""The views of the pages, one module for each kind of page.

Views that read files are plain functions. Starlette calls them in other threads, so they don't block the event loop.
"""
