"""Refusals of `hsx generate`, mostly before the first row is sent, with remedies."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from generate_bench import Bench
from generate_files import Exchange, Seen, contents, token_rows, write_jsonl
from generate_harness import FakeServer

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.weights import Origin, WeightVersion
from vllm_ascend_hsx.sinks.data_file import FileOptions


def test_output_name_that_is_not_utf8_is_refused(bench: Bench) -> None:
    bench.output /= "a\udcff"
    code, printed = bench.run()
    assert code == 2 and "the name is not UTF-8" in printed and "Traceback" not in printed


def test_unreachable_server_is_reported_before_anything_is_sent(bench: Bench) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = bench.run(endpoint=url)
    assert code == 2
    assert f"hsx generate: {url}/v1/models: [Errno 111] Connect call failed" in printed
    assert printed.endswith("; start a server there, or give another --endpoint")
    assert contents(bench.output) == {}


def test_connection_reset_before_tls_is_reported(bench: Bench) -> None:
    """httpx reports it without a message."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def reset() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    connection, _ = listener.accept()
                    connection.recv(1)  # the handshake has begun
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    connection.close()

        thread = threading.Thread(target=reset)
        thread.start()
        code, printed = bench.run(
            "--max-retries", 1, endpoint=f"https://127.0.0.1:{listener.getsockname()[1]}"
        )
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert code == 2 and "/v1/models: [Errno 104] Connection reset by peer" in printed, printed


def test_untrusted_certificate_is_refused_and_the_remedy_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "server.pem"
    certificate.write_bytes(self_signed("127.0.0.1"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with FakeServer(tmp_path / "out", tls=tls) as server:
        bench = Bench(tmp_path, server, capsys)
        code, printed = bench.run()
        assert (code, server.probes) == (2, 0)
        assert (
            f"{server.url}/v1/models: the certificate is not trusted: self-signed certificate; "
            in printed
        )
        assert "set SSL_CERT_FILE or SSL_CERT_DIR to the certificate" in printed
        assert "tried again" not in printed
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert bench.run("--limit", 1)[0] == 0
        code, printed = bench.run(endpoint=server.url.replace("127.0.0.1", "localhost"))
        assert (
            code == 2
            and "Hostname mismatch" in printed
            and "host name of the certificate in --endpoint" in printed
        )


def self_signed(address: str) -> bytes:
    """Create a certificate for an IP address, and the key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
    )
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    made = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.PEM) + private


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "2", "--world-size", "2"], "--rank 2: give a number from 0 to 1"),
        (["--endpoint", "localhost:8000"], "--endpoint localhost:8000: give the URL of a server"),
        (["--endpoint", "http://"], "--endpoint http:: give the URL of a server"),
        (["--endpoint", "http://a/v1,http://a"], "--endpoint: a URL is given twice"),
        (["--endpoint", ","], "--endpoint: give the URL of at least one server"),
        (["--map-path", "/a"], "--map-path /a: give SERVER=LOCAL"),
        (
            ["--endpoint", "http://localhost:99999"],
            "--endpoint http://localhost:99999: Port out of range 0-65535; give the URL",
        ),
        (
            ["--endpoint", "http://a..b"],
            "--endpoint http://a..b: encoding with 'idna' codec failed",
        ),
        (["--endpoint", "http://a/\x1b[2J"], r"--endpoint http://a/\x1b[2J: "),
        (
            ["--api-key", "k\u00e9y"],
            "--api-key (or OPENAI_API_KEY): not allowed in an HTTP header",
        ),
        (
            ["--api-key", "key\nX-Other: 1"],
            "--api-key (or OPENAI_API_KEY): not allowed in an HTTP header",
        ),
        (
            ["--data", "a" * 300],
            "a'; give a readable file or folder, or the id of a dataset on a hub",
        ),
        (
            ["--max-tokens", "4"],
            "--max-tokens: the prompt's rows do not depend on it; add --include-output",
        ),
        (["--include-output-tokens"], "--include-output: give --max-tokens"),
        (["--data", "nothing.jsonl"], "nothing.jsonl: no such file or folder"),
        (["--column", "text"], "data.jsonl:1: it has no 'text', only ['token_ids']"),
    ],
)
def test_invalid_option_is_reported_with_remedy(
    bench: Bench, arguments: list[str], message: str
) -> None:
    data = write_jsonl(bench.root / "data.jsonl", token_rows(2))
    command = ["--data", str(data), "--output", str(bench.output), *arguments]
    if "--endpoint" not in arguments:
        command += ["--endpoint", bench.server.url]
    code = generate.main(command)
    printed = bench._capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("hsx generate: ") and message in printed.err
    assert "key" not in printed.err.replace("--api-key", "") and "k\u00e9y" not in printed.err
    assert (bench.server.probes, bench.server.seen, contents(bench.output)) == (0, [], {})


def test_bad_row_is_reported_before_anything_is_sent(bench: Bench) -> None:
    code, printed = bench.run(records=[*token_rows(50), {"token_ids": [1, -1]}])
    assert code == 2
    assert "data.jsonl:51: token_ids[1] is -1; token ids are whole numbers from 0" in printed
    assert (bench.server.probes, bench.server.seen, contents(bench.output)) == (0, [], {})


def test_another_dataset_is_refused_here_and_accepted_in_a_subfolder(
    bench: Bench,
) -> None:
    assert bench.run(records=8)[0] == 0
    others = [{"token_ids": [7, row]} for row in range(6)]
    code, printed = bench.run(records=others)
    assert (
        code == 2 and "holds rows of another dataset: only 0 of 8 finished rows are in" in printed
    )
    assert "give another --output, such as a new folder below this one" in printed
    assert len(bench.server.seen) == 8
    bench.output /= "below/it"
    assert bench.run(records=others)[0] == 0
    assert bench.rows == [*range(6)]


async def other_layers(
    exchange: Exchange, server: FakeServer, *, weights: str = "", **changes: Any
) -> None:
    row_format = RowFormat(
        **{"layer_ids": (2, 0, 3), "hidden_size": 8, "dtype": "BF16", "model": "tiny"} | changes
    )
    with server.make_sink(server.storage, row_format, FileOptions()) as sink:
        file = await server.begin(exchange, sink)
        file.origin = Origin([WeightVersion(fingerprint=weights)])
        await server.answer(exchange, await server.publish(exchange, file))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "other"}, "model was tiny, is other; serve the same model and layers"),
    "layers": ({"layer_ids": (2, 0)}, "layer_ids was [2, 0, 3], is [2, 0], layers was 3, is 2"),
    "order of layers": ({"layer_ids": (2, 3, 0)}, "layer_ids was [2, 0, 3], is [2, 3, 0]"),
    "basis": ({"basis": "rotated"}, "rotated was False, is True"),
    "quantization": ({"quantization": "fp8"}, "dtype was bfloat16, is bfloat16 in float8_e4m3fn"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ledger", ["whole", "of a run that was killed before it noted the server"])
def test_different_server_is_refused_and_its_files_are_removed(
    any_bench: Bench, name: str, ledger: str
) -> None:
    bench, (changes, message) = any_bench, OTHERS[name]
    bench.server.behave = lambda seen: 400 if seen.row == 3 else "ok"
    assert bench.run()[0] == 1
    if ledger != "whole":
        keep_lines(bench, lambda line: "ledger" in line)

    async def do_other(exchange: Exchange) -> None:
        await other_layers(exchange, bench.server, **changes)

    bench.server.do_other = do_other  # type: ignore[attr-defined]
    bench.server.behave = lambda seen: "other"
    code, printed = bench.run()
    assert code == 2 and message in printed, printed
    bench.check([0, 1, 2, 4, 5])


def keep_lines(bench: Bench, wanted: Callable[[dict[str, Any]], bool]) -> None:
    ledger = bench.output / "ledger.jsonl"
    ledger.write_text(
        "".join(line for line in ledger.read_text().splitlines(True) if wanted(json.loads(line)))
    )


@pytest.mark.parametrize("validate", [True, False])
def test_rows_that_differ_from_the_ledger_are_not_replaced(bench: Bench, validate: bool) -> None:
    """With one digit changed in the ledger, all files seem to be from another server."""
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("[2,0,3]", "[2,0,4]"))
    (bench.output / "hs_0.safetensors").unlink()
    whole = contents(bench.output)
    code, printed = bench.run(*["--validate"] * validate, "--concurrency", 1)
    assert (
        code == 2 and "of another server than" in printed
    ) or "holds rows of another server: layer_ids was [2, 0, 4]" in printed
    assert contents(bench.output) == whole


def test_two_servers_that_differ_are_refused(bench: Bench) -> None:
    class Other(FakeServer):
        async def do_ok(self, exchange: Exchange) -> None:
            await other_layers(exchange, self, layer_ids=(1, 0, 3))

    with Other(bench.output) as other:
        code, printed = bench.run("--endpoint", other.url, records=40)
    assert code == 2 and "holds rows of another server: layer_ids was" in printed
    assert len({str(tensors) for tensors in map(len, contents(bench.output).values())}) <= 2


def test_server_without_extraction_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "do_ok", FakeServer.do_no_params)
    code, printed = bench.run("--concurrency", 8)
    assert code == 2 and "was the server started with hidden-state extraction?" in printed
    asked = len(bench.server.seen)
    assert asked <= 4
    code, printed = bench.run(endpoint=bench.server.url + "/elsewhere")
    assert (
        code == 2
        and "answers 404: " in printed
        and "give --endpoint the URL of a `vllm serve`" in printed
    )
    code, printed = bench.run("--model", "huge")
    assert code == 2 and "serves tiny, not huge; give a served model's name with --model" in printed
    assert len(bench.server.seen) == asked


def test_the_key_of_the_server_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FakeServer(tmp_path / "store", api_key="secret") as server:
        bench = Bench(tmp_path, server, capsys)
        code, printed = bench.run()
        assert (
            code == 2
            and (
                "answers 401: Unauthorized; give the server's key with --api-key or in "
                "OPENAI_API_KEY"
            )
            in printed
        )
        assert bench.run("--api-key", "secret", "--limit", 1)[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert bench.run()[0] == 0
        bench.check(list(range(6)))
        monkeypatch.setenv("OPENAI_API_KEY", "")  # as in a job without the secret
        assert "answers 401" in bench.run("--limit", 2, "--output", tmp_path / "store" / "other")[1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ALL_PROXY", "socks5://localhost:9", "ALL_PROXY: "),
        ("HTTP_PROXY", "foo:bar", "HTTP_PROXY: Port could not be cast to integer value as 'bar'"),
        ("HTTP_PROXY", "localhost:99999", "HTTP_PROXY: Port out of range 0-65535"),
        ("HTTPS_PROXY", "ftp://localhost", "HTTPS_PROXY: Unknown scheme for proxy URL"),
        ("SSL_CERT_FILE", "/none.pem", "SSL_CERT_FILE: "),
    ],
)
def test_unusable_environment_variable_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    if name == "ALL_PROXY":
        monkeypatch.setitem(sys.modules, "socksio", None)
    code, printed = bench.run()
    assert code == 2 and message in printed and printed.endswith("; correct or unset it"), printed


# Paths that the server refuses, or that lead to another directory


def test_server_that_refuses_chosen_paths_is_reported_immediately(bench: Bench) -> None:
    bench.server.allow_path = False
    code, printed = bench.run()
    assert code == 2 and "refuses the path of a row's file: " in printed
    assert (
        "kv_connector_extra_config.allow_custom_save_path=true" in printed
        and "--out of `hsx serve`" in printed
    )
    assert len(bench.server.seen) == 1
    assert contents(bench.output) == {}


@pytest.mark.parametrize(
    "more", [[], ["--include-output", "--max-tokens", 2], ["--world-size", 2, "--rank", 1]]
)
def test_wrong_output_directory_is_reported_and_left_empty(
    bench: Bench, tmp_path: Path, more: list[object]
) -> None:
    bench.output = tmp_path / "elsewhere" / "below"
    code, printed = bench.run(*more, records=40)
    assert (
        code == 2
        and f"use a path below {bench.server.storage}" in printed
        and "--map-path SERVER=HERE" in printed
    )
    assert len(bench.server.seen) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_refused_output_keeps_its_contents(bench: Bench, tmp_path: Path) -> None:
    bench.output = tmp_path / "elsewhere"
    bench.output.mkdir()
    (bench.output / "mine").touch()
    assert bench.run()[0] == 2
    assert contents(bench.output) == {"mine": {}}


@pytest.mark.parametrize("behaviour", ["ok", "hang"])
def test_refused_output_keeps_its_ledger_while_files_may_appear(
    bench: Bench, tmp_path: Path, behaviour: str
) -> None:
    """Without the ledger the next run would refuse the file."""
    asked = threading.Event()

    def wait(seen: Seen, stage: str) -> None:
        assert asked.wait(30)

    with FakeServer(tmp_path / "other", at=wait) as other:
        bench.server.at = lambda seen, stage: (
            asked.set() if stage == {"ok": "answered", "hang": "asked"}[behaviour] else None
        )
        bench.server.behave = lambda seen: behaviour
        code, printed = bench.run("--endpoint", other.url)
    assert code == 2 and f"{other.url} refuses the path" in printed, printed
    assert "ledger.jsonl" in contents(bench.output)


@pytest.mark.parametrize("more", [[], ["--world-size", 2, "--rank", 1]])
def test_a_refused_dataset_adds_no_ledger(bench: Bench, more: list[object]) -> None:
    assert bench.run()[0] == 0
    before = contents(bench.output)
    code, printed = bench.run(*more, records=[{"token_ids": [7, row]} for row in range(40)])
    assert code == 2 and "holds rows of another dataset" in printed
    assert contents(bench.output) == before


def test_unshared_directory_of_the_same_path_is_reported(bench: Bench, tmp_path: Path) -> None:
    """The server writes a file, but it does not exist on this machine."""
    bench.output = tmp_path / "mounted"
    code, printed = bench.run(
        "--map-path", f"{bench.server.storage}={bench.output}", "--concurrency", 8
    )
    assert code == 2, printed
    assert re.search(
        r"the server wrote .*/out/hs_\d.safetensors, but .*/mounted/hs_\d.safetensors does not "
        r"exist; mount the server's storage directory here",
        printed,
    )
    assert len(bench.server.seen) <= 4


@pytest.mark.parametrize("status", [401, 403, 404])
def test_rejecting_server_pauses_while_another_works(
    bench: Bench, tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(bench.output) as other:
        monkeypatch.setattr(other, "behave", lambda seen: "ok" if len(other.seen) < 5 else status)
        code, printed = bench.run("--endpoint", other.url, "--concurrency", 4, records=60)
        assert other.seen
    assert code == 0, printed
    assert f"answers {status}" in printed and f"next request to {other.url} in" in printed
    assert len([*bench.output.glob("*.safetensors")]) == 60


def test_run_ends_if_the_only_server_starts_to_require_a_key(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench.server, "behave", lambda seen: "ok" if len(bench.server.seen) < 5 else 401
    )
    code, printed = bench.run("--concurrency", 1, records=60)
    assert code == 2 and "give the server's key with --api-key" in printed
    assert len(bench.server.seen) == 5
