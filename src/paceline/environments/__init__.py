"""Python environments, built from a job's packages and cached by content.

The package imports nothing: nodes load parts of it without the resolvers and their libraries.
"""
