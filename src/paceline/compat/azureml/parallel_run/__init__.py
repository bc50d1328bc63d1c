"""The workers of a ParallelRunStep.

They call `init()` and `run(mini_batch)` of the user's script for all mini-batches. The first rank dispatches
mini-batches (`sharing`) over connections that only the run's own workers can open. Each rank runs the script in a
separate process (`scoring`), and replaces the process after a timeout or crash.
https://learn.microsoft.com/azure/machine-learning/v1/how-to-debug-parallel-run-step
"""
