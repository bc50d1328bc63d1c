"""What a run's workers do: stacks, who waits for whom, stragglers, profiles, load; `node` holds what runs on each node."""
