"""What Horovod's names mean before any framework is loaded."""
