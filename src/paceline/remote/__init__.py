"""Work on another machine: the agent there, the supervisor's link to it, and file transfers both ways."""
