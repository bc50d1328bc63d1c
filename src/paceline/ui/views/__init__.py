"""The pages, one module for each kind. What waits for files is a plain function: Starlette calls those on other threads."""
