"""What each layout would need and take, from measured blocks: shown by `explain`, and what "auto" chooses by."""
