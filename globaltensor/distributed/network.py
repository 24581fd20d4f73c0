"""The local addresses and network interfaces by which this machine reaches others.

The launcher and the world call this module. Nothing is sent to find them.

Gloo publishes the address to which this host's own name resolves. On Debian that is 127.0.1.1, and
on a host without a name server there is none. Every rank then looks for the others on its own host.
``choose_gloo_interface`` repairs that. NCCL and MPI choose an interface by their own means.
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
    "gloo_address",
    "gloo_hint",
    "interface_of",
    "is_here",
    "machine_name",
    "own_address",
]

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
# An address reserved for documentation (RFC 5737): the route to it is the default route.
_ELSEWHERE: Final = "192.0.2.1"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR, from linux/sockios.h
_ANY_PORT: Final = 9


def own_address(host: str) -> str:
    """Return this machine's address on the route to ``host``.

    Return an empty string if there is no route, or if it stays on the loopback interface.

    >>> own_address("127.0.0.1")
    ''
    """
    return next((own for own, _ in _routes(host) if not _stays_here(own)), "")


def is_here(host: str) -> bool:
    """Return True if ``host`` is this machine.

    The addresses decide; it does not matter to which address this machine's own name resolves.

    >>> is_here("localhost")
    True
    """
    return any(_stays_here(there) or own == there for own, there in _routes(host))


def _routes(host: str) -> Iterator[tuple[str, str]]:
    """Yield (address of this machine, address of the host) for each route to the host."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(
            host, _ANY_PORT, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # datagrams: only the route is looked up
                yield str(probe.getsockname()[0]), str(where[0])


def interface_of(address: str) -> str:
    """Return the network interface that has this address, or an empty string if there is none.

    >>> interface_of("")
    ''
    """
    if not address:
        return ""
    wanted = ipaddress.ip_address(address.split("%")[0])
    return next((name for _, name in socket.if_nameindex() if wanted in _addresses(name)), "")


def addresses_of() -> dict[str, list[str]]:
    """Return the addresses of each network interface of this machine that has any."""
    found = {
        name: sorted(map(str, _addresses(name)), key=lambda a: ":" in a)
        for _, name in socket.if_nameindex()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def choose_gloo_interface(host: str, nodes: int) -> None:
    """Choose the interface that Gloo uses, if this host's name resolves to no useful address.

    It is the interface on the route to ``host``, where rank 0 is, or else on the default route. The
    choice is written to GLOO_SOCKET_IFNAME, which torch reads whenever it creates a group. A value
    set by the user is left unchanged.
    """
    if os.environ.get(VARIABLE) or not _stays_here(_resolve_host(socket.gethostname())):
        return
    own = own_address(host)
    # Here ``host`` may be a name of this host itself, which resolves to a loopback address on it.
    if not own and nodes > 1 and host not in _LOOPBACK:
        own = own_address(_ELSEWHERE)
    found = interface_of(own)
    if found:
        os.environ[VARIABLE] = found


def gloo_address(nodes: int) -> tuple[str, str]:
    """Return (interface, address) that Gloo publishes on this host in a job of ``nodes`` nodes.

    If GLOO_SOCKET_IFNAME is set, the interface is the first one named there, and the address is
    empty if this host has no such interface. Otherwise the interface is empty if no interface of
    this host has the address, and the address is 127.0.0.1 if there is no other. In a job of
    several nodes, rank 0 is assumed to be on another host, on the default route.
    """
    chosen = os.environ.get(VARIABLE, "").split(",")[0]
    if chosen:
        return chosen, next(iter(addresses_of().get(chosen, [])), "")
    address = _resolve_host(socket.gethostname())
    if _stays_here(address):
        address = (own_address(_ELSEWHERE) if nodes > 1 else "") or address or "127.0.0.1"
    return interface_of(address), address


def gloo_hint(error: Exception, host: str) -> str:
    """Return a remedy for a Gloo error that the wrong interface causes.

    Return an empty string for other errors.
    """
    text = str(error)
    if "connectFullMesh" not in text and "Unable to find address" not in text:
        return ""
    name, hostname = os.environ.get(VARIABLE), socket.gethostname()
    interfaces = {name for _, name in socket.if_nameindex()}
    if name:
        problem = f"{VARIABLE} is {name!r}" + (
            "" if set(name.split(",")) <= interfaces else ", which this host does not have"
        )
    else:
        problem = (
            f"{VARIABLE} is not set, so the other ranks were sent "
            f"{_resolve_host(hostname) or 'no address'}, to which the name of this host, "
            f"{hostname}, resolves"
        )
    better = interface_of(own_address(host))
    names = (
        f"here {better} leads to {host}"
        if better
        else f"here there are {', '.join(sorted(interfaces))}"
    )
    return (
        f"{problem}: set it on every node to the network interface by which the nodes reach each "
        f"other ({names})"
    )


def _stays_here(address: str) -> bool:
    return not address or ipaddress.ip_address(address.split("%")[0]).is_loopback


def _resolve_host(name: str) -> str:
    """Return the first address to which a host's name resolves, or an empty string."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def _addresses(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the first IPv4 address and all IPv6 addresses of an interface.

    On systems other than Linux the set is empty.
    """
    addresses: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(
                any_socket.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15])
            )
            addresses.add(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if name == interface:
                addresses.add(ipaddress.IPv6Address(bytes.fromhex(address)))
    return addresses


def machine_name() -> str:
    """Return this machine's name and, on Linux, its boot id, which differs between machines."""
    try:
        return socket.gethostname() + Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()
