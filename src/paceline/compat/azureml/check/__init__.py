"""A static check of how much of an Azure ML SDK program runs with Paceline.

The check reads source text without running any of it.
"""
