"""Certificates that nobody signed but their owner."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "gpu.example") -> Path:
    """One file with the key and the certificate; `public.pem` beside it has the certificate alone."""
    made, public = folder / "certificate.pem", folder / "public.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-keyout", str(made), "-out", str(public)],
        check=True, capture_output=True,
    )  # fmt: skip
    made.write_text(made.read_text() + public.read_text())
    return made
