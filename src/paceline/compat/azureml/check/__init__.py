"""What of programs for the Azure ML SDK will run here, read from their text; nothing of them is run."""
