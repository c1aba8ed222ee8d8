"""What live input is, in half a minute: a prompt that is typed word by word, and the same prompt sent whole.

python scripts/demo.py [MODEL] [--stay]
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from websockets.sync.client import ClientConnection, connect

WORDS_PER_SECOND = 60
LINE_LENGTH = 110
MESSAGE = """
Hello! I hope that you are well. Let me tell you first why I ask. Yesterday I went for a walk with my
daughter, who is six years old. We took the old path along the river, past the mill and the three tall
poplars, up to the hill from which one can see the whole valley. It was one of those clear days in early
autumn, when the air is so clean that the mountains in the south look as if they were just behind the next
village. We sat down in the grass and ate our bread and apples, and she lay on her back and looked up for a
long time without saying anything, which does not happen often. Then the questions began. She wanted to know
how high the sky is, and whether birds can fly to the end of it. She wanted to know where the stars are
during the day, and who switches them on. She asked why clouds do not fall down although there is so much
water in them, and why the moon was there in the afternoon, when it has no business to be there. I did what
I could. Some of it I knew from school, some of it I made up, and some of it I promised to look up at home,
which she will not forget, because she never forgets a promise. On the way back it became colder, and the
light turned yellow and then red behind the poplars, and she asked about that as well. But the first of all
her questions, the one that I could not answer at all, although everybody must have asked it once, is the
one that I now pass on to you.
"""
QUESTION = "Why is the sky blue?"


def start_server(model: str) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port, and its address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "segue", "serve", model, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    said = ""
    for line in server.stderr:
        said += line
        if (found := re.search(r"https?://\S+", line)) is not None:
            return server, found[0]
    server.wait()
    raise SystemExit(f"demo: the server did not start\n{said}")


def events(connection: ClientConnection) -> Iterator[dict[str, object]]:
    for message in connection:
        event = json.loads(message)
        if event["type"] == "error":
            raise SystemExit(f"demo: {event['error']['message']}")
        yield event


def send(connection: ClientConnection, **event: object) -> None:
    connection.send(json.dumps(event))


@contextmanager
def session(url: str, instructions: str) -> Iterator[ClientConnection]:
    """A session whose history nobody has computed before."""
    with connect(url.replace("http", "ws", 1) + "/v1/realtime") as connection:
        send(connection, type="session.update", session={"type": "realtime", "instructions": instructions})
        yield connection


def answer(connection: ClientConnection, *, show: bool) -> float:
    """Ask for the answer; milliseconds until its first text."""
    begin = time.perf_counter()
    send(connection, type="input_text.commit")
    response = {"temperature": 0, "max_output_tokens": 60}
    send(connection, type="response.create", response=response)
    first_ms = 0.0
    for event in events(connection):
        if event["type"] == "response.output_text.delta":
            first_ms = first_ms or 1000 * (time.perf_counter() - begin)
            if show:
                print(event["delta"], end="", flush=True)
        elif event["type"] == "response.done":
            break
    return first_ms


def live(url: str, text: str) -> float:
    """Type the text word by word, then press Enter."""
    with session(url, "You answer the last question of each message.") as connection:
        column = 0
        for word in re.findall(r"\S+\s*", text):
            column = column + len(word) if column + len(word) < LINE_LENGTH else len(word)
            print("\n" * (column == len(word)) + word, end="", flush=True)
            send(connection, type="input_text.append", text=word)
            time.sleep(1 / WORDS_PER_SECOND)
        print("\n\n> ", end="", flush=True)
        first_ms = answer(connection, show=True)
        print("\n")
        return first_ms


def whole(url: str, text: str) -> float:
    with session(url, "You are asked questions in messages, and answer the last.") as connection:
        begin = time.perf_counter()
        send(connection, type="input_text.append", text=text)
        sent_ms = 1000 * (time.perf_counter() - begin)
        return sent_ms + answer(connection, show=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--stay", action="store_true", help="leave the server running until Ctrl-C")
    args = parser.parse_args()
    server, url = start_server(args.model)
    text = f"{' '.join(MESSAGE.split())} {QUESTION}"
    try:
        live_ms = live(url, text)
        whole_ms = whole(url, text)
        print(f"first token after the last word, computed while it was typed: {live_ms:6.0f} ms")
        print(f"the same prompt sent whole at the end:                        {whole_ms:6.0f} ms")
        print(
            f"the server is at {url}"
            + (" (Ctrl-C ends it)" if args.stay else "; make serve leaves it running")
        )
        if args.stay:
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
