"""From what a job says it needs to an interpreter that has it, cached by content.

Nothing is imported here: the job's description (`environments.environment`) is read in workers, where the resolvers and
their libraries are not installed.
"""
