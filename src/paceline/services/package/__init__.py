"""Write a folder that builds and serves a model elsewhere: Dockerfile, exact versions, models, script and server."""
