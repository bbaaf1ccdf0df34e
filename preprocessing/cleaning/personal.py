"""Personal data in text: e-mail and IP addresses, replaced by made-up ones that are nobody's.

As in Dolma (Soldaini et al. 2024, arXiv 2402.00159, section 4.3) and FineWeb (Penedo et al. 2024, arXiv
2406.17557): e-mail addresses become `email@example.com` (RFC 2606 reserves the name), public IPv4 and
IPv6 addresses one of the networks for documentation (RFC 5737, RFC 3849). Private, local and reserved
addresses say nothing about a person and stay, and so do numbers such as versions that are no address.
"""

import ipaddress
import re
from dataclasses import dataclass

EMAIL = "email@example.com"
IPV4 = "192.0.2.1"
IPV6 = "2001:db8::1"

# Local parts as people have them (no quoted ones) and a name with a dot, bounded so that no text is slow.
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z0-9_][A-Za-z0-9._%+-]{0,63}@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-])"
)
# What may stand before an address is looked at afterwards: a pattern that begins with digits is searched faster.
_IPV4 = re.compile(r"[0-9]{1,3}\.(?:[0-9]{1,3}\.){2}[0-9]{1,3}(?!\w|\.[0-9]|-[A-Za-z])", re.ASCII)
# All public addresses begin with 2 or 3 (2000::/3, RFC 4291); so `std::vector` and `bad::face` are none.
_IPV6 = re.compile(r"[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:])", re.ASCII)


@dataclass(frozen=True)
class Masked:
    """A text without personal data, and how many addresses were replaced."""

    text: str
    emails: int
    ip_addresses: int


def mask_personal_data(text: str) -> Masked:
    """Replace e-mail addresses and public IP addresses; what was replaced before is not counted again."""
    counts = {"email": 0, "ip": 0}

    def without_email(match: re.Match[str]) -> str:
        counts["email"] += match.group() != EMAIL
        return EMAIL

    def without_address(match: re.Match[str]) -> str:
        before = match.string[match.start() - 1 : match.start()]
        is_inside = before.isascii() and (before.isalnum() or before in (".", "_"))
        if is_inside or (before == ":" and match.re is _IPV6):
            return match.group()
        try:
            address = ipaddress.ip_address(match.group())
        except ValueError:
            return match.group()
        if not address.is_global:
            return match.group()
        counts["ip"] += 1
        return IPV4 if address.version == 4 else IPV6

    if "@" in text:
        text = _EMAIL.sub(without_email, text)
    text = _IPV4.sub(without_address, text)
    if "::" in text or text.count(":") > 6:
        text = _IPV6.sub(without_address, text)
    return Masked(text, counts["email"], counts["ip"])
