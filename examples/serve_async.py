"""Serve a model over TCP: a line is a prompt, and its text comes back as it is made.

python examples/serve_async.py MODEL [PORT]

What all connections ask for runs in one batch. Whoever hangs up is aborted.
"""

import asyncio
import sys
from contextlib import closing

from specdec import AsyncLLM, SamplingParams, SpecdecError


async def main(model: str, port: str = "8765") -> None:
    """Load, and serve until interrupted."""
    params = SamplingParams(temperature=0, max_tokens=64, output_kind="delta")
    async with await AsyncLLM.create(model) as llm:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while line := await reader.readline():
                    async for output in llm.generate(line.decode().strip(), params):
                        writer.write(output.outputs[0].text.encode())
                        await writer.drain()  # a client that reads slowly holds up nobody else
                    writer.write(b"\n")
            except (SpecdecError, ConnectionError) as error:
                print(error)
            finally:
                writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", int(port))
        print("listening on port", server.sockets[0].getsockname()[1], flush=True)
        with closing(server):
            await asyncio.Event().wait()  # for ever


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
