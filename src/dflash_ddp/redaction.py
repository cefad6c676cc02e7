"""Credentials stay out of whatever is printed or written.

They belong into the environment, where the clients of the hub, of wandb and of object stores look for them. `redact`
takes them out of a text: the values of environment variables that are named like credentials, and what looks like one
wherever it comes from. Log lines, messages and env.json pass through it; a setting that it would change is refused.
"""

import os
import re

HIDDEN = "***"
_MIN_LENGTH = 8  # a shorter value of a variable may be a word of any text
_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)(?!.*(FILE|PATH|DIR)$)", re.IGNORECASE)
_NAME = r"[\w.-]*(?:api_?key|access_?key|secret|passw|credential|(?:auth|hf|session)_?token)"
_PATTERNS = (
    (r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)", HIDDEN),  # scheme://user:password@host
    (r"(?<=://)[^/\s:@'\"]{20,}(?=@)", HIDDEN),  # scheme://token@host
    (r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}", HIDDEN),
    (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", HIDDEN),
    (r"(?i)(?<=\bbearer )[^\s'\"]{8,}", HIDDEN),
    (rf"(?i)({_NAME}[\w.-]*['\"]?\s*[=:]\s*['\"]?)[^\s'\",&;)}}]+", rf"\1{HIDDEN}"),
    (r"(?i)([?&](?:token|sig|signature|key|x-amz-[\w-]+)=)[^\s'\",&]+", rf"\1{HIDDEN}"),
)


def redact(text: str) -> str:
    """The text with every credential that is known, or known by its look, replaced by `***`."""
    secrets = {value for name, value in os.environ.items() if _VARIABLE.search(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_LENGTH:
            text = text.replace(secret, HIDDEN)
    for pattern, hidden in _PATTERNS:
        text = re.sub(pattern, hidden, text)
    return text
