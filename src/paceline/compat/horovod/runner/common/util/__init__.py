"""`horovod.runner.common.util`: codec, env, host_hash, hosts, safe_shell_exec, secret, settings, timeout, tiny_shell_exec."""
