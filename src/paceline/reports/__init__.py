"""What is worked out from the folders of runs for somebody to read: how two of them differ, what all of them have used."""
