"""The session of docs/api.md: a server in a thread, and the clients of OpenAI and Anthropic."""

import threading

import anthropic
import openai

from bitnet_inference.models import Models
from bitnet_inference.server import Listening, ServedModels, ServerOptions, make_front, make_server

served = ServedModels(Models(max_cache_tokens=2048), {"story": "default"})
options = ServerOptions()
server = make_server(make_front(served, options), Listening(port=0), options)
socket = server.config.bind_socket()
socket.listen()
url = f"http://127.0.0.1:{socket.getsockname()[1]}"
thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
thread.start()

talk = [{"role": "user", "content": "Tell me a story about a fox called Mia"}]
with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    answer = client.chat.completions.create(model="story", messages=talk, temperature=0, max_tokens=8)
    print(answer.choices[0].message.content, "|", answer.choices[0].finish_reason)

    chunks = client.chat.completions.create(model="story", messages=talk, temperature=0, max_tokens=8, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == answer.choices[0].message.content

    scored = client.completions.create(model="story", prompt="Once upon a", max_tokens=0, echo=True, logprobs=1)
    print(scored.choices[0].logprobs.tokens)

    picked = client.completions.create(
        model="story", prompt="Is a fox red?", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert picked.choices[0].text in ("yes", "no")

    first = client.responses.create(model="story", input="Tell me a story about a cat", max_output_tokens=8)
    then = client.responses.create(model="story", input="And a dog?", previous_response_id=first.id, max_output_tokens=8)
    print(then.status, then.incomplete_details.reason)

    vectors = client.embeddings.create(model="story", input=["a fox", "a bear"])
    print(len(vectors.data), "vectors of", len(vectors.data[0].embedding))

with anthropic.Anthropic(base_url=url, api_key="none") as client:
    message = client.messages.create(model="story", messages=talk, max_tokens=8)
    print(message.stop_reason, message.usage.output_tokens)

server.should_exit = True
thread.join()
served.close()
