"""Files on their way between stores and machines: listed, fetched, cached, uploaded."""
