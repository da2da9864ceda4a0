"""`aenv dev-cert`: a local certificate authority and a wildcard certificate."""

from __future__ import annotations

from pathlib import Path

import click

from aenv.cli.output import json_option, print_json
from aenv.http.devcert import make_dev_cert


@click.command("dev-cert")
@click.argument("domain")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where the files go.")
@json_option
def dev_cert_command(domain: str, out: Path, as_json: bool) -> None:
    """Make a CA and a certificate for DOMAIN and *.DOMAIN: ca.pem, cert.pem, key.pem.

    For development only: whoever holds key.pem can be DOMAIN for everyone who trusts ca.pem.
    """
    made = make_dev_cert(domain, out)
    if as_json:
        print_json({"ca": str(made.ca), "cert": str(made.cert), "key": str(made.key)})
        return
    click.echo(
        f"""made {made.ca}, {made.cert} and {made.key}

Serve with them:
  aenv serve --tls-listen 127.0.0.1:8443 --domain {domain}:8443 --cert {made.cert} --key {made.key}
Trust the CA:
  Python SDK     export SSL_CERT_FILE={made.ca}
  JavaScript SDK export NODE_EXTRA_CA_CERTS={made.ca}
  this machine   cp {made.ca} /usr/local/share/ca-certificates/aenv-{domain}.crt && update-ca-certificates
Names must resolve to the server: api.{domain} and *.{domain} (a wildcard record; /etc/hosts has none)."""
    )
