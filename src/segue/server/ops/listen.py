"""Sockets and certificates, checked before a model is loaded. Imports no web framework."""

import errno
import os
import socket
import ssl
import stat

from segue.errors import ParameterError
from segue.server.shared.options import ServerOptions


def bind(options: ServerOptions) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises ParameterError when that cannot be."""
    return _bind_tcp(options) if options.uds is None else _bind_unix(options.uds)


def address_of(listener: socket.socket, options: ServerOptions) -> str:
    """How clients reach it."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port, *_ = listener.getsockname()
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def check_tls(options: ServerOptions) -> None:
    """Raises ParameterError for a certificate or key that cannot be used."""
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            options.ssl_certfile, options.ssl_keyfile, password=lambda: ""
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ParameterError(
            "ssl_certfile", options.ssl_certfile, f"cannot be used with {options.ssl_keyfile}: {reason}"
        ) from None


def _bind_tcp(options: ServerOptions) -> socket.socket:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        raise ParameterError("host", options.host, "is no address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ParameterError("port", options.port, "is in use: choose another one with --port") from None
        raise ParameterError("host", options.host, f"cannot be used: {error.strerror}") from None
    return listener


def _bind_unix(path: str) -> socket.socket:
    """A socket at this path, where one that nobody listens to any more may lie."""
    try:
        if _is_socket(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(path) == 0:
                    raise ParameterError("uds", path, "is in use by another server")
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ParameterError("uds", path, f"cannot be used: {error.strerror or error}") from None
    return listener


def _is_socket(path: str) -> bool:
    return os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)
