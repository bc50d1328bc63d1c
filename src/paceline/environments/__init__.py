"""From what a job says it needs to an interpreter that has it, cached by content.

Nothing is imported here: nodes load parts of this package where the resolvers and their libraries are not installed.
"""
