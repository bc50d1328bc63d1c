"""The pages, one module for each kind.

Views that read files are plain functions, which Starlette calls on other threads.
"""
