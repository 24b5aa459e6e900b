r"""Forms of secrets in texts: named values, tokens of well-known services, URLs, headers, commands and key blocks.

    redact_known_forms("password=abcd1234 and hf_...")        # "password=(redacted) and (redacted)"

1. `NAME = VALUE` in the notations of shells, JSON, YAML, TOML, Python, XML, HTML, URLs and command lines, where the
   name marks the value as secret. A number is a setting (`max_token = 512`) unless the name is that of a password.
2. Tokens by their prefix, webhooks by their address, passwords in URLs, cookies, hashes of passwords, private keys.
3. The `data` of a Kubernetes Secret, whatever its keys are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["NAMES", "REDACTED", "redact_known_forms"]

REDACTED = "(redacted)"
MIN_VALUE_CHARS = 4
NAMES = (
    r"[\w.-]{0,60}(?:pass(?:word|wort|wd|phrase|code)|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|(?:secret|signing|encryption|fernet|master|storage|account|client|deploy|license|shared|hmac|ssh|service)[_-]?key"
    r"(?:[_-]?(?:base|data))?|(?:wandb|comet|neptune|hub|hf)[._-]?key|connection[_-]?string|credentials?|sshpass|cookie"
    r"|auth(?:orization)?|(?:db|pg|mysql|redis|smtp|user|admin|root)_?pass|signature|x-amz-credential)(?:_file)?"
)
_VALUE = r"[^\s\"'\\,;&<>()\[\]{}“”]"
_COLOUR = r"(?:(?:\x1b|\\(?:x1b|u001b|033|e))\[[\d;]{0,12}m)*"
_NO_SECRET = r"none\b|null\b|true\b|false\b|\(redacted\)|\*{3,}"
_IS = r"\s*(?::=|=>|=|:(?!=)|%3[aAdD])\s*"
_QUOTE = r"\\?(?:[\"'“]|&quot;|&#3[49];)"
_MARK = r"\\?[\"']"
_MIXED = r"(?=[^\s\"'\\]{0,200}\d)[^\s\"'\\]"
"""To be repeated: a character of a value that has a digit."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OF_PASSWORD = re.compile(r"(?i)pass|pwd|secret")

_QUOTED = re.compile(
    rf"(?i)(?<![\w-])(?P<keep>(?:--)?(?P<name>{NAMES})(?![\w-])\\?[\"']?\]?{_IS}[rbfu]?\\?(?P<quote>\"\"\"|'''|[\"']))"
    rf"(?P<value>(?!\(redacted\))[^\"'\n]{{{MIN_VALUE_CHARS},500}}?)(?=\\?(?P=quote))"
)
"""NAME="value", with any text between the quotes."""
_NAMED = re.compile(
    rf"(?i)(?<![\w-])(?P<keep>(?:--)?(?P<name>{NAMES})(?![\w-])"
    rf"(?:{_QUOTE})?{_IS}(?:[>|][+-]?\s*(?:\n|\\n)\s*)?(?:[rbu](?=\\?[\"']))?(?:{_QUOTE}|\"\"|'')?{_COLOUR})"
    rf"(?:(?:bearer|basic|token|api-?key|digest|negotiate)\s+)?(?P<value>(?!{_NO_SECRET}){_VALUE}{{{MIN_VALUE_CHARS},}})"
)
"""NAME=value, "name": "value", name: value."""
_OPTION = re.compile(
    rf"(?i)(?<![\w-])(?P<keep>--(?P<name>{NAMES})\s+[\"']?)(?P<value>(?!{_NO_SECRET}){_VALUE}{{{MIN_VALUE_CHARS},}})"
)
"""--name value."""
_LISTED = re.compile(
    rf"(?i)(?P<keep>(?:(?P<quote>[\"'])--|(?<=\()(?P<other>[\"']))(?P<name>{NAMES})(?:(?P=quote)|(?P=other))\s*,\s*"
    rf"[rbu]?[\"'])(?P<value>(?!{_NO_SECRET})(?=[^\"'\n]{{0,200}}\d)[^\"'\n]{{{MIN_VALUE_CHARS},500}})"
)
"""['--name', 'value'] and ('name', 'value')."""
_SPACED = re.compile(
    rf"(?i)(?<![\w-])(?P<keep>(?P<name>{NAMES})\s+(?:is\s+)?[\"']?)"
    rf"(?P<value>(?=\S{{0,200}}\d)(?=\S{{0,200}}[a-z])[\w+/=~.-]{{12,}})"
)
"""password value, as in .netrc: only values that mix letters and digits."""
_ELEMENT = re.compile(
    rf"(?i)(?P<keep><(?P<name>{NAMES})>\s*)(?P<value>(?!{_NO_SECRET})[^<>\s][^<>]{{{MIN_VALUE_CHARS - 1},500}})(?=</)"
)
"""<name>value</name>."""

_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:A(?:KI|SI|BI|CC)A[0-9A-Z]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
    r"|gl(?:pat|cbt|rt|dt|ft|soat|agent|ptt|imt)-[\w-]{20,}|gl(?:sa|c)_[\w+/=-]{20,}|npm_\w{30,}|pypi-[\w-]{30,}"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|wandb_v1_\w{20,}|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|sk-[\w-]{20,}|[srp]k_(?:live|test)_\w{16,}|whsec_[\w+/=]{16,}|nvapi-[\w-]{20,}|r8_\w{20,}|gsk_\w{20,}"
    r"|xai-\w{20,}|dckr_(?:pat|oat)_[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|SK[0-9a-f]{32}|dapi[0-9a-f]{32}"
    r"|hv[sbr]\.[\w-]{20,}|dp\.(?:pt|st|ct|sa|scim|audit)\.\w{20,}|lin_api_\w{20,}|ntn_\w{20,}|PMAK-[\w-]{20,}"
    r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|do[opr]_v1_[0-9a-f]{64}|pul-[0-9a-f]{40}|sntry[su]_[\w+/=-]{20,}"
    r"|ATATT3xFf[\w=-]{20,}|figd_[\w-]{20,}|tskey-[\w-]{20,}|pscale_(?:pw|tkn)_[\w-]{20,}|sbp_\w{30,}|nfp_\w{30,}|fm[12]_[\w+/=-]{40,}|[\w.~]{3}8Q~[\w~.-]{30,}|AGE-SECRET-KEY-1[0-9A-Z]{50,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|\$(?:apr1|1|2[abxy]|5|6|y|argon2\w{1,2}|scrypt)\$[^\s:\"'<>]{16,})"
)
_OTHERS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?i)\b(?P<keep>(?:bearer|basic)(?:\s+|=)){_VALUE}{{12,}}",
        r"(?i)\b(?P<keep>(?:set-)?cookie\\?[\"']?\s*[:=]\s*\\?[\"']?)(?!\(redacted\))[^\s\"'=]{1,100}=[^\r\n\"'\\]{4,}",
        # in URLs: a password, a token alone before the host, a signature made for one download
        r"(?i)(?P<keep>[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{0,200}:)[^\s/]{1,500}(?=@)",
        r"(?i)(?P<keep>\bhttps?://)[^\s/:@]{16,500}(?=@)",
        r"(?i)(?P<keep>[?&](?:sig|key|code)=)[^\s&\"'<>]{8,}",
        # addresses that are secrets themselves
        r"(?P<keep>https://hooks\.slack\.com/(?:services|workflows|triggers)/)[\w/-]+",
        r"(?P<keep>https://(?:\w{1,20}\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[\w/-]+",
        r"(?P<keep>https://[\w-]{1,60}\.webhook\.office\.com/)[\w/@-]+",
        r"(?P<keep>https://outlook\.office(?:365)?\.com/webhook/)[\w/@-]+",
        r"(?P<keep>https://api\.telegram\.org/(?:file/)?bot)\d+:[\w-]+",
        r"(?P<keep>https://events\.(?:eu\.)?pagerduty\.com/(?:integration|x-ere)/)[\w-]+",
        # a password prompt with the typed answer
        r"(?i)(?P<keep>\bpass(?:word|phrase) for [^\r\n]{1,200}?:[ \t]+)[^\s\"']{4,}",
        # calls and messages that have the value without its name
        rf"(?i)(?P<keep>\blogin\(\s*(?:(?:key|token)\s*=\s*)?{_MARK}){_MIXED}{{16,500}}",
        rf"(?i)(?P<keep>\b(?:auth\s*=\s*|\w{{0,20}}Auth)\(\s*{_MARK}[^\"'\n]{{1,80}}{_MARK}\s*,\s*{_MARK}){_MIXED}{{8,500}}",
        rf"(?i)(?P<keep>\bapi key\b[^\n\\\"'(:]{{0,20}}(?:[(:]|{_MARK})\s*(?:{_MARK}|\()?){_MIXED}{{12,500}}",
        rf"(?i)(?P<keep>\b(?:key|name)={_MARK}{NAMES}{_MARK}\s+value={_MARK})[^\s\"'\\]{{4,500}}",
        # commands
        rf"(?i)(?P<keep>\b(?:docker|podman|helm|oc|az)\b[^\n]{{0,100}}?\blogin\b[^\n]{{0,200}}?\s-p[\s=]*(?:{_MARK})?){_MIXED}{{4,500}}",
        r"(?P<keep>\bsshpass\s+-p\s*[\"']?)[^\s\"']{4,}",
        r"(?P<keep>\bwandb\s+login\s+(?:--\S{1,40}\s+){0,4})[\w-]{32,}",
        r"(?P<keep>\b(?:curl|http|https)\b[^\n]{0,300}?\s(?:-u|--user|-a)[\s=]*[\"']?[^\s:\"']{1,80}:)[^\s\"']{4,}",
        r"(?P<keep>\b(?:mysql|mysqldump|mariadb)\b[^\n]{0,300}?\s-p)[^\s\"'-][^\s\"']{3,}",
    )
)
_WORDS = re.compile(
    r"(?i)pass|pwd|secret|token(?!s|iz|_(?!file))|key|connection|credential|auth|signature|cookie|bearer|basic|://|curl|https?\b"
    r"|mysql|mariadb|wandb|login|[?&](?:sig|code)="
)
"""A word of each of the patterns above."""
_PRIVATE_KEY = re.compile(r"(?s)(?P<keep>-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----).{1,20000}?(?=-----END|\Z)")
_PUTTY_KEY = re.compile(
    r"(?P<keep>Private-Lines: \d{1,4}(?:\\[rn]|\s){1,4})[\w+/=]{8,}(?:(?:\\[rn]|\s){1,4}(?!Private)[\w+/=]{8,})*"
)
_IS_SECRET_OBJECT = re.compile(r"\bkind\\?[\"']?\s*:\s*\\?[\"']?Secret\b")
_SECRET_DATA = (
    re.compile(r"(?m)^(?P<keep>(?P<indent>[ \t]*)(?:stringD|d)ata:[ \t]*\n)(?:(?P=indent)[ \t]+\S[^\n]*(?:\n|\Z))+"),
    re.compile(r"(?P<keep>(?:stringD|d)ata:[ \t]*\\n)(?:[ \t]+[^\s\\\"'][^\\\"']*(?:\\n|(?=[\"'])|\Z))+"),
    re.compile(r"(?P<keep>\\?\"(?:stringD|d)ata\\?\"\s*:\s*\{)[^{}]{1,100000}(?=\})"),
)


def redact_known_forms(text: str) -> str:
    """The text without the secrets whose form is known."""
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(rf"\g<keep>{REDACTED}", text)
    if "Private-Lines" in text:
        text = _PUTTY_KEY.sub(rf"\g<keep>{REDACTED}", text)
    text = "".join(_within_lines(text))
    text = _TOKENS.sub(REDACTED, text)
    if _IS_SECRET_OBJECT.search(text):
        for pattern in _SECRET_DATA:
            text = pattern.sub(_without_data, text)
    return text


def _within_lines(text: str) -> Iterator[str]:
    """Yield the redacted text in pieces. Only lines with a word of a pattern, and the line after each, are searched."""
    done = 0
    while (found := _WORDS.search(text, done)) is not None:
        begin = max(done, text.rfind("\n", 0, found.start()) + 1)
        end = _end_of_line(text, _end_of_line(text, found.end()))
        while (again := _WORDS.search(text, max(begin, text.rfind("\n", 0, end - 1) + 1), end)) is not None:
            if end == (end := _end_of_line(text, _end_of_line(text, again.end()))):
                break
        yield text[done:begin]
        yield _by_line_patterns(text[begin:end])
        done = end
    yield text[done:]


def _end_of_line(text: str, place: int) -> int:
    return (text.find("\n", place) + 1) or len(text)


def _by_line_patterns(text: str) -> str:
    for pattern in (_QUOTED, _NAMED, _OPTION, _LISTED, _SPACED, _ELEMENT):
        text = pattern.sub(_without_value, text)
    for pattern in _OTHERS:
        text = pattern.sub(rf"\g<keep>{REDACTED}", text)
    return text


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if _NUMBER.fullmatch(value) and not _OF_PASSWORD.search(name):
        return match[0]
    if name.lower().endswith("pwd") and value.startswith(("/", "~", "$")):
        return match[0]  # the working directory
    return match["keep"] + REDACTED


def _without_data(match: re.Match[str]) -> str:
    return match["keep"] + (f"{match['indent']}  {REDACTED}\n" if "indent" in match.re.groupindex else REDACTED)
