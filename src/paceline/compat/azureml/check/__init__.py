"""A static check of how much of an Azure ML SDK program runs with Paceline.

It reads source text and runs none of it.
"""
