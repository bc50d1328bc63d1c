"""Work on another machine: the agent that runs there, the supervisor's link to it, and file transfers both ways."""
