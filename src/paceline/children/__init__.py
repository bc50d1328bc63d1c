"""What controllers of runs with children have in common, those of sweeps and of pipelines: their process, and how they look at,
end and hand over what is below them.
"""
