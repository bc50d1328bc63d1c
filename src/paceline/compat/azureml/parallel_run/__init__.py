"""What the workers of a ParallelRunStep run: `init()` and `run(mini_batch)` of the user's script, over all mini-batches.

The first rank shares them out (`sharing`), over a connection that only the run's own workers can make. Each rank lets a process
of its own run the script (`scoring`), which can be replaced where a call takes too long or the process dies.
https://learn.microsoft.com/azure/machine-learning/v1/how-to-debug-parallel-run-step
"""
