"""No credential in what is printed or written; what is none stays as it is."""

import ast
import json
import logging

import pytest
from test_layering import FILES, PACKAGE, imported

from dflash_ddp.failures import write_failure
from dflash_ddp.log import setup_logging
from dflash_ddp.redaction import redact

SECRETS = {
    "s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/x": "s3://***@bucket/x",
    "https://user:p%40ss@host:8080/a?b=1": "https://***@host:8080/a?b=1",
    "https://ghp_aaaabbbbccccddddeeee@github.com/x": "https://***@github.com/x",
    "token is hf_AbCdEfGhIjKlMnOpQrSt, sorry": "token is ***, sorry",
    "AKIAIOSFODNN7EXAMPLE": "***",
    "Authorization: Bearer abcdefgh12345": "Authorization: Bearer ***",
    "+logging.api_key=abc": "+logging.api_key=***",
    "{'aws_secret_access_key': 'abc/def', 'b': 1}": "{'aws_secret_access_key': '***', 'b': 1}",
    "wandb_api_key: 'x1'": "wandb_api_key: '***'",
    "password=hunter2&user=me": "password=***&user=me",
    "https://h/a?X-Amz-Signature=abc&token=d&x=1": "https://h/a?X-Amz-Signature=***&token=***&x=1",
}
PLAIN = [
    "s3://bucket/prefix/step_00000100",
    "sftp://me@host/data",
    "data.path=/a/b@c:d.jsonl tokens_per_batch=1024 drafter.mask_token_id=151669",
    "target.revision=0123456789abcdef0123456789abcdef01234567",
    "secrets are counted: key, value and rule; a token at 12:30",
    "split.targets=5 (rank 3: target) key=value",
    "train/accept_length: 1.68, 100 tokens/s",
]


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_credential_is_hidden(text):
    assert redact(text) == SECRETS[text]
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_stays(text):
    assert redact(text) == text


def test_values_of_the_environment_are_hidden_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("MY_HF_TOKEN", "not-of-any-shape")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets-of-aws")
    text = "got 0123456789abcdef0123456789abcdef01234567/not-of-any-shape false /var/run/secrets-of-aws"
    assert redact(text) == "got ***/*** false /var/run/secrets-of-aws"


def test_log_lines_and_their_tracebacks_are_without_credentials(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "of-no-known-shape")
    level = logging.getLogger("dflash_ddp").level
    root = logging.getLogger()
    handlers = root.handlers[:], root.level
    setup_logging(rank=0, role="target", verbose=True)
    try:
        raise OSError("cannot open s3://me:hunter2@bucket with of-no-known-shape")
    except OSError:
        logging.getLogger("dflash_ddp.x").exception("at %s", "of-no-known-shape")
    root.handlers[:], root.level = handlers
    logging.getLogger("dflash_ddp").setLevel(level)
    written = capsys.readouterr().err
    assert "at ***" in written
    assert "OSError: cannot open s3://***@bucket with ***" in written
    assert "hunter2" not in written


def test_the_cause_that_a_failed_run_leaves_is_without_credentials(tmp_path):
    text = "cannot open s3://me:hunter2@bucket"
    write_failure(tmp_path, f"{text}\nOSError: {text}", phases={"0": "data"}, restart=0)
    (file,) = tmp_path.iterdir()
    failure = json.loads(file.read_text())
    assert failure["cause"] == "cannot open s3://***@bucket"
    assert failure["trace"] == "OSError: cannot open s3://***@bucket"


FORBIDDEN = {"pickle", "dill", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_of_others_is_unpickled(file):
    """Weights are safetensors, everything else JSON, arrays and YAML without objects."""
    assert not {name.split(".")[0] for name in imported(file)} & FORBIDDEN
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert called != "torch.load" or keywords.get("weights_only") == "True"
            assert called not in ("eval", "exec", "yaml.load", "yaml.unsafe_load")
            assert keywords.get("allow_pickle", "False") == "False"
            if called == "AutoModel.from_pretrained":
                assert keywords["use_safetensors"] == "True"
