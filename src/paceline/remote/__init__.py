"""Run commands and transfer files on other machines, through an agent process on each node."""
