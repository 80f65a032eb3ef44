"""`drmas serve-retriever` as a user meets it: its lines, its exit status, its answers over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from drmas.config.tasks import SearchTool
from drmas.envs.search.tool import Search

CONTENTS = {
    "w": '"Tungsten"\nTungsten is the chemical element with atomic number 74.',
    "l": '"Lima"\nLima is the capital of Peru.',
    "s": '"São Tomé"\nThe lakes of São Tomé are small.',
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": name, "contents": text}) + "\n" for name, text in CONTENTS.items()))
    return str(file)


@contextlib.contextmanager
def serving(*words: str, program: str | None = None):
    """The server in a process of its own, and its first line."""
    command = [sys.executable, *(("-c", program) if program else ("-m", "drmas.cli")), "serve-retriever", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url(corpus):
    with serving("--corpus", corpus, "--port", "0", "--topk-limit", "7") as (_, line):
        yield line.split()[-1]


def test_it_says_where_it_is_when_it_is_ready(corpus):
    with serving("--corpus", corpus, "--port", "0") as (_, line):
        about, url = line.rsplit(" ", 1)
        assert about == "bm25 index of 3 passages:"
        answer = httpx.post(url.strip(), json={"query": "capital of Peru"}, trust_env=False)
        assert answer.json()["result"][0][0] == {"id": "l", "contents": CONTENTS["l"]}


def test_the_options_reach_the_server(url):
    health = httpx.get(url.replace("/retrieve", "/health"), trust_env=False).json()
    assert (health["passages"], health["topk_limit"]) == (3, 7)
    assert httpx.post(url, json={"query": "x", "topk": 8}, trust_env=False).status_code == 422


async def test_200_searches_of_the_tool_at_once(url):
    search = Search(SearchTool(url=url, topk=1, cache_size=0))
    await search.start()
    queries = [f"{('capital of Peru', 'atomic number', 'sao tome lakes')[n % 3]} {n}" for n in range(200)]
    answers = await asyncio.gather(*(search.call("search", {"query": query}) for query in queries))
    await search.close()
    heads = [text.partition("\n")[0] for text, ok in answers if ok]
    assert heads == [f"[1] {('Lima', 'Tungsten', 'São Tomé')[n % 3]}" for n in range(200)]


async def test_an_index_behind_a_url_reads_like_one_in_the_process(url, corpus):
    searches = Search(SearchTool(url=url)), Search(SearchTool(corpus=corpus))
    for query in ("capital of Peru", "SAO TOME!", "the element", "zyzzyva"):
        texts = []
        for search in searches:
            await search.start()
            texts.append(await search.call("search", {"query": query}))
        assert texts[0] == texts[1]
    for search in searches:
        await search.close()


def test_a_body_without_end_is_refused(url):
    def endless():
        while True:
            yield b" " * 65536

    with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # the connection may close before the answer is read
        assert httpx.post(url, content=endless(), trust_env=False).status_code == 413
    assert httpx.post(url, json={"query": "Peru"}, trust_env=False).status_code == 200


def test_a_port_that_is_taken_is_one_line_and_status_2(drmas, corpus):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = drmas("serve-retriever", "--corpus", corpus, "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"drmas: serve-retriever: can't listen on 127.0.0.1 port {port}: Address already in use; give another --host or --port "
        "(--port 0 takes a free one)\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--corpus", "none.jsonl"], "drmas: corpus none.jsonl: No such file or directory; expected a JSONL file of passages"),
        (["--faiss", "x.index"], "drmas: serve-retriever: --faiss is a dense index; give --index dense with it"),
        (["--index", "dense", "--encoder", "nowhere"], "drmas: encoder 'nowhere': no config.json there"),
        (["--index", "dense", "--faiss", "none.index"], "drmas: none.index: no such file"),
        (["--host", "no.such.host.invalid"], "drmas: serve-retriever: can't listen on no.such.host.invalid port 0: "),
    ],
)
def test_what_cannot_be_served_is_one_line_and_status_2(drmas, corpus, words, message):
    done = drmas("serve-retriever", "--corpus", corpus, "--port", "0", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(message)


def test_an_address_that_others_reach_is_warned_of(corpus):
    with serving("--corpus", corpus, "--port", "0", "--host", "0.0.0.0") as (process, line):
        assert "http://0.0.0.0:" in line
        process.terminate()
        warning = process.stderr.readline()
    assert warning == "drmas: 0.0.0.0 is reached from other machines, and this server asks nobody for a password\n"


STUCK = """
import sys, threading
import drmas.envs.search.index as index
def search(self, queries, topk):
    print("searching", flush=True)
    threading.Event().wait()
index.Bm25Index.search = search
from drmas.cli.main import main
main()
"""


def test_ctrl_c_ends_it_at_once_also_amid_a_search_that_never_ends(corpus):
    words = ("--corpus", corpus, "--port", "0", "--deadline-seconds", "3600")
    with serving(*words, program=STUCK) as (process, line):
        host, port = line.split()[-1].removeprefix("http://").removesuffix("/retrieve").split(":")
        with socket.create_connection((host, int(port))) as asker:
            asker.sendall(b'POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n{"query": "x"}')
            assert process.stdout.readline() == "searching\n"
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "Error" not in err


def test_an_index_is_kept_in_a_folder(corpus, tmp_path):
    folder = tmp_path / "kept"
    for _ in range(2):
        with serving("--corpus", corpus, "--port", "0", "--index", "dense", "--index-folder", str(folder)) as (_, line):
            url = line.split()[-1]
            assert line.startswith("dense index of 3 passages")
            answer = httpx.post(url, json={"queries": ["capital of Peru"], "topk": 1, "return_scores": True}, trust_env=False)
            (((hit),),) = answer.json()["result"]
            assert hit["document"]["id"] == "l"
            assert 0.3 < hit["score"] <= 1.0
        assert {path.name for path in folder.iterdir()} == {"index.json", "vectors.faiss"}


def test_a_faiss_file_and_an_encoder_folder_are_served(corpus, tmp_path):
    import faiss

    from drmas.envs.search.encoder import PACKAGED, Encoder, encoder_folder

    index = faiss.IndexFlatIP(384)
    index.add(Encoder().passages(list(CONTENTS.values())))
    faiss.write_index(index, str(tmp_path / "flat.index"))
    words = ("--index", "dense", "--faiss", str(tmp_path / "flat.index"), "--encoder", str(encoder_folder(PACKAGED)))
    with serving("--corpus", corpus, "--port", "0", *words) as (_, line):
        answer = httpx.post(line.split()[-1], json={"query": "metal 74", "topk": 1}, trust_env=False)
        assert answer.json()["result"] == [[{"id": "w", "contents": CONTENTS["w"]}]]
