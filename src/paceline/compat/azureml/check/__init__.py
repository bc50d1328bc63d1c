"""A static check of how much of an Azure ML SDK program runs here.

It reads source text and runs none of it.
"""
