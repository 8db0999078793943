"""Connections between the processes of a job: TCP, TLS, the handshake, messages on control connections, data between slots."""
