"""Which of this machine's addresses leads to another machine, and by which network interface.
Nothing is sent to find out.

Gloo tells the other ranks the address that this host's name means, which on Debian is 127.0.1.1 and
on a host without a name server nothing: every rank then looks for the others on itself.
``choose_gloo_interface`` mends that; NCCL and MPI look at the interfaces by themselves.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = [
    "addresses_of",
    "choose_gloo_interface",
    "gloo_hint",
    "interface_of",
    "is_here",
    "own_address",
]

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_ELSEWHERE: Final = (
    "192.0.2.1"  # kept for documentation (RFC 5737): the way there is the default route
)
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR, from linux/sockios.h
_ANY_PORT: Final = 9


def own_address(host: str) -> str:
    """The address of this machine from which it reaches ``host``; empty where there is no way, or
    the way stays on the loopback interface.

    >>> own_address("127.0.0.1")
    ''
    """
    return next((own for own, _ in _routes(host) if not _stays_here(own)), "")


def is_here(host: str) -> bool:
    """Is ``host`` this machine? By its addresses: what this machine takes its own name to mean
    doesn't matter.

    >>> is_here("localhost")
    True
    """
    return any(_stays_here(there) or own == there for own, there in _routes(host))


def _routes(host: str) -> Iterator[tuple[str, str]]:
    """(address of this machine, address of the host) for each way to it."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(
            host, _ANY_PORT, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # of datagrams: only the route is looked up
                yield str(probe.getsockname()[0]), str(where[0])


def interface_of(address: str) -> str:
    """The network interface that has this address; empty where none is found.

    >>> interface_of("")
    ''
    """
    if not address:
        return ""
    wanted = ipaddress.ip_address(address.split("%")[0])
    return next((name for _, name in socket.if_nameindex() if wanted in _addresses(name)), "")


def addresses_of() -> dict[str, list[str]]:
    """The addresses of each network interface of this machine that has some."""
    found = {
        name: sorted(map(str, _addresses(name)), key=lambda a: ":" in a)
        for _, name in socket.if_nameindex()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def choose_gloo_interface(host: str, nodes: int) -> None:
    """Where this host's own name leads nowhere, let Gloo use the interface by which ``host``, where
    rank 0 is met, is reached (else the default route).

    Sets GLOO_SOCKET_IFNAME, which torch reads whenever it makes a group; what the user has set
    stays.
    """
    if os.environ.get(VARIABLE) or not _stays_here(_meaning(socket.gethostname())):
        return
    own = own_address(host)
    if (
        not own and nodes > 1 and host not in _LOOPBACK
    ):  # a name that on this host, which it is, means this host
        own = own_address(_ELSEWHERE)
    found = interface_of(own)
    if found:
        os.environ[VARIABLE] = found


def gloo_hint(error: Exception, host: str) -> str:
    """What to do about an error of Gloo's that comes of the wrong interface; empty for other
    errors."""
    text = str(error)
    if "connectFullMesh" not in text and "Unable to find address" not in text:
        return ""
    name, here = os.environ.get(VARIABLE), socket.gethostname()
    there = {name for _, name in socket.if_nameindex()}
    if name:
        told = f"{VARIABLE} is {name!r}" + (
            "" if set(name.split(",")) <= there else ", which this host does not have"
        )
    else:
        told = (
            f"{VARIABLE} is not set, so the others were told {_meaning(here) or 'no address'}, "
            f"which the name of this host, {here}, means"
        )
    better = interface_of(own_address(host))
    names = (
        f"here {better} leads to {host}" if better else f"here there are {', '.join(sorted(there))}"
    )
    return (
        f"{told}: set it on every node to the network interface by which the nodes reach each "
        f"other ({names})"
    )


def _stays_here(address: str) -> bool:
    return not address or ipaddress.ip_address(address.split("%")[0]).is_loopback


def _meaning(name: str) -> str:
    """The first address that a host's name means; empty where it means none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def _addresses(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Its first IPv4 address and all of IPv6. Linux only: elsewhere it is as if there were none."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(
                any_socket.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15])
            )
            found.add(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if name == interface:
                found.add(ipaddress.IPv6Address(bytes.fromhex(address)))
    return found
