"""A certificate authority of a test: certificates with their keys as PEM files, real and short-lived."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = self._build(self._name, self._key).add_extension(constraints, True)
        self.path = directory / f"{name}.pem"
        self._signed = self._certificate.sign(self._key, hashes.SHA256())
        self.path.write_bytes(self._signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, uri: str = "", dns: str = "", ip: str = "", days: float = 1) -> Identity:
        """For a common name, and other names where given. `days` below 0: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._build(subject, key, days)
        others: list[x509.GeneralName] = []
        if uri:
            others.append(x509.UniformResourceIdentifier(uri))
        if dns:
            others.append(x509.DNSName(dns))
        if ip:
            others.append(x509.IPAddress(ipaddress.ip_address(ip)))
        if others:
            builder = builder.add_extension(x509.SubjectAlternativeName(others), False)
        made = Identity(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        signed = builder.sign(self._key, hashes.SHA256())
        made.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return made

    def _build(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float = 1) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        begin, end = now - datetime.timedelta(days=2), now + datetime.timedelta(days=days)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )


def channel(address: str, authority: Authority, identity: Identity | None) -> grpc.Channel:
    """By TLS, with a certificate of our own or without."""
    key = identity.key.read_bytes() if identity else None
    certificate = identity.certificate.read_bytes() if identity else None
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), key, certificate)
    return grpc.secure_channel(address, credentials, options=(("grpc.use_local_subchannel_pool", 1),))
