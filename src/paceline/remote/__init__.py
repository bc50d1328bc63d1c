"""Another machine: the agent that runs on it, the supervisor's link to it, and the files that travel there and back."""
