import socket

import pytest

from kvgraft.server.process import HOST, reserved_port


def test_a_reserved_port_is_for_the_server_alone():
    with reserved_port() as port, socket.socket() as other, socket.socket() as server:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        with pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        server.bind((HOST, port))
        server.listen()
        socket.create_connection((HOST, port)).close()
