"""Delta tables; the extra `midstream[delta]`. Begin with `delta_sink`."""
