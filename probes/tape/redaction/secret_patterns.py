r"""Forms of secrets in texts: named values, tokens of well-known services, URLs, headers, commands and key blocks.

    redact_known_forms("password=abcd1234 and hf_...")        # "password=(redacted) and (redacted)"

1. `NAME = VALUE` in the notations of shells, JSON, YAML, TOML, Python, XML, HTML, URLs and command lines, where the
   name marks the value as secret. A number is taken for a setting (`max_token = 512`), unless the name is a password's.
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
    r"|(?:secret|signing|encryption|fernet|master|storage|account|client|deploy|license|shared|hmac|ssh|service|app"
    r"|application|routing|integration|subscription|functions)[_-]?key(?:[_-]?(?:base|data))?"
    r"|(?:wandb|comet|neptune|kaggle|hub|hf)[._-]?key|connection[_-]?string|credentials?|sshpass|cookie|(?<![a-z0-9])pw"
    r"|auth(?:orization)?|(?:db|pg|mysql|redis|smtp|user|admin|root|default|become|login|proxy|ldap)_?pass|signature"
    r"|x-amz-credential|x-honeycomb-team|samlresponse)(?:_file)?"
)
_VALUE = r"[^\s\"'\\,;&<>()\[\]{}“”]"
_COLOUR = r"(?:(?:\x1b|\\(?:x1b|u001b|033|e))\[[\d;]{0,12}m)*"
_NO_SECRET = r"none\b|null\b|true\b|false\b|\(redacted\)|\*{3,}"
_IS = r"\s*(?::=|=>|=|:(?!=)|%3[aAdD])\s*"
_QUOTE = r"\\?(?:[\"'“]|&quot;|&#3[49];)"
_GAP = r"(?:\s|\\[rn]){1,20}"
_MARK = r"\\?[\"']"
_MIXED = r"(?=[^\s\"'\\]{0,200}\d)[^\s\"'\\]"
"""Pattern of a value with a digit in its first 201 characters. A quantifier must follow: `{4,500}`."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PASSWORD_NAME = re.compile(r"(?i)pass|pwd|secret")

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
_HEADER = re.compile(
    rf"(?i)(?P<keep>\b(?:proxy-)?(?P<name>authorization)\\?[\"']?\s*[:=]\s*(?:[rb]?{_MARK})?)(?P<value>[a-z][\w-]{{1,30}}"
    rf"[ \t]+(?:(?:[\w-]{{1,30}}=(?:\\?\"[^\"\n]{{0,500}}\"|[^\s\"',\\]{{1,500}})(?:,\s*)?){{1,20}}|{_VALUE}{{8,}}))"
)
"""Authorization: SCHEME value."""
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
    rf"(?i)(?<![\w-])(?P<keep>(?P<name>{NAMES})\s+(?:is:?\s+)?[\"'(]?)"
    rf"(?P<value>(?=\S{{0,200}}\d)(?=\S{{0,200}}[a-z])[\w+/=~.-]{{12,}})"
)
"""password value, password (value): only values that mix letters and digits."""
_ELEMENT = re.compile(
    rf"(?i)(?P<keep><(?P<name>{NAMES})>\s*)(?P<value>(?!{_NO_SECRET})[^<>\s][^<>]{{{MIN_VALUE_CHARS - 1},500}})(?=</)"
)
"""<name>value</name>."""

_ANY_KEY = re.compile(
    rf"(?i)(?<![\w-])(?P<keep>[\w.-]{{1,60}}[_-](?:key|pat)(?:{_QUOTE})?{_IS}(?:{_QUOTE})?)"
    r"(?-i:(?=[\w+/=-]{0,200}\d)(?=[\w+/=-]{0,200}[a-z])(?=[\w+/=-]{0,200}[A-Z])[\w+/=-]{20,500}|[0-9a-f]{32,128})(?![\w.+/=-])"
)
"""ANY_KEY=value: only values that look random, because other keys (of a table, of a state) are not secret."""
_PAIR = (rf"\\?[\"']?\s*[:=]\s*{_MARK}?", rf"{_MARK}?(?:\s|\\n|,){{1,80}}{_MARK}?value\\?[\"']?\s*[:=]\s*{_MARK}?")

_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:A(?:KI|SI|BI|CC)A[0-9A-Z]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
    r"|gl(?:pat|cbt|rt|dt|ft|ffct|oas|soat|agent|ptt|imt)-[\w-]{20,}|gl(?:sa|c)_[\w+/=-]{20,}|npm_\w{30,}|pypi-[\w-]{30,}"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|wandb_v1_\w{20,}|xox[a-eprs]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|sk-[\w-]{20,}|[srp]k_(?:live|test)_\w{16,}|whsec_[\w+/=]{16,}|nvapi-[\w-]{20,}|r8_\w{20,}|gsk_\w{20,}"
    r"|xai-\w{20,}|dckr_(?:pat|oat)_[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|SK[0-9a-f]{32}|dapi[0-9a-f]{32}"
    r"|hv[sbr]\.[\w-]{20,}|dp\.(?:pt|st|ct|sa|scim|audit)\.\w{20,}|lin_api_\w{20,}|ntn_\w{20,}|PMAK-[\w-]{20,}"
    r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|do[opr]_v1_[0-9a-f]{64}|pul-[0-9a-f]{40}|sntry[su]_[\w+/=-]{20,}"
    r"|ATBB\w{24,}|ATTA\w{60,}|sq0(?:atp|csp|idp)-[\w-]{20,}|key-[0-9a-f]{32}|secret_[A-Za-z0-9]{40,}"
    r"|pat\w{14}\.[0-9a-f]{64}|pk_\d{5,12}_\w{20,}|HRKU-[\w-]{20,}|sl\.[\w-]{100,}"
    r"|rubygems_[0-9a-f]{48}|AKCp\w{60,}|sq[pua]_[0-9a-f]{40}|CCIPAT_\w{20,}|bkua_\w{20,}|sb_secret_[\w-]{20,}|pplx-\w{30,}"
    r"|tvly-[\w-]{20,}|lsv2_[ps][tk]_\w{20,}|pcsk_\w{20,}|csk-\w{30,}|api_org_\w{20,}|CFPAT-[\w-]{30,}|pnu_[A-Za-z0-9]{30,}"
    r"|dbtc_[\w-]{20,}|napi_\w{30,}|mdb_sa_sk_[\w-]{20,}|rpa_[A-Za-z0-9]{30,}|NRAK-\w{20,}|ops_eyJ[\w-]{50,}|oy2[a-z0-9]{43}"
    r"|AT[AC]TT3xFf[\w=-]{20,}|figd_[\w-]{20,}|tskey-[\w-]{20,}|pscale_(?:pw|tkn)_[\w-]{20,}|sbp_\w{30,}|nfp_\w{30,}|fm[12]_[\w+/=-]{40,}|[\w.~]{3}8Q~[\w~.-]{30,}|AGE-SECRET-KEY-1[0-9A-Z]{50,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|\$(?:apr1|1|2[abxy]|5|6|y|argon2\w{1,2}|scrypt)\$[^\s:\"'<>]{16,})"
)
_OTHERS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?i)\b(?P<keep>(?:bearer|basic)(?:\s+|=|%20)){_VALUE}{{12,}}",
        r"(?i)(?P<keep>\bcookies\\?[\"']?\s*[:=]\s*\{)[^{}]{4,5000}(?=\})",
        rf"(?P<keep>\bCookie\([^()\n]{{0,300}}?\bvalue={_MARK})[^\"'\n\\]{{4,}}",
        r"(?i)\b(?P<keep>(?:set-)?cookie\\?[\"']?\s*[:=]\s*\\?[\"']?)(?!\(redacted\))[^\s\"'=]{1,100}=[^\r\n\"'\\]{4,}",
        # in URLs: a password, a token alone before the host, a signature made for one download
        r"(?i)(?P<keep>[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{0,200}:)[^\s/]{1,500}(?=@)",
        r"(?i)(?P<keep>[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{0,200}:)(?!\d{1,5}/)[^\s\"'<>,;@]{1,500}(?=@)",
        r"(?i)(?P<keep>\b(?:jdbc:oracle:\w{1,10}:|sqlplus\s+(?:-\w+\s+){0,4})[^\s/@]{1,100}/)[^\s@]{1,200}(?=@)",
        r"(?i)(?P<keep>\bhttps?://)[^\s/:@]{16,500}(?=@)",
        r"(?i)(?P<keep>[?&](?:sig|key|code|sas|hmac)=)[^\s&\"'<>]{8,}",
        # addresses that are secrets themselves
        r"(?P<keep>https://hooks\.slack\.com/(?:services|workflows|triggers)/)[\w/-]+",
        r"(?P<keep>https://(?:\w{1,20}\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[\w/-]+",
        r"(?P<keep>https://[\w-]{1,60}\.webhook\.office\.com/)[\w/@-]+",
        r"(?P<keep>https://outlook\.office(?:365)?\.com/webhook/)[\w/@-]+",
        r"(?P<keep>https://api\.telegram\.org/(?:file/)?bot)\d+:[\w-]+",
        r"(?P<keep>https://events\.(?:eu\.)?pagerduty\.com/(?:integration|x-ere)/)[\w-]+",
        # a password prompt with the typed answer
        r"(?i)(?P<keep>\bpass(?:word|phrase) for [^\r\n]{1,200}?:[ \t]+)[^\s\"']{4,}",
        r"(?<!\w)(?P<keep>)(?:\d{8,10}:AA[\w-]{30,40}|\w{14}\.atlasv1\.[\w-]{50,}|[0-9a-f]{32}-us\d{1,2})(?![\w-])",
        # calls and messages that contain a secret value without a name
        rf"(?i)(?P<keep>\blogin\(\s*(?:(?:key|token)\s*=\s*)?{_MARK}){_MIXED}{{16,500}}",
        rf"(?i)(?P<keep>\b(?:auth\s*=\s*|\w{{0,20}}Auth)\(\s*{_MARK}[^\"'\n]{{1,80}}{_MARK}\s*,\s*{_MARK}){_MIXED}{{8,500}}",
        rf"(?i)(?P<keep>\bapi key\b[^\n\\\"'(:]{{0,20}}(?:[(:]|{_MARK})\s*(?:{_MARK}|\()?){_MIXED}{{12,500}}",
        rf"(?i)(?P<keep>\b(?:key|name){_PAIR[0]}{NAMES}{_PAIR[1]})(?!{_NO_SECRET})[^\s\"'\\]{{4,500}}",
        rf"(?i)(?P<keep>\bvalue{_PAIR[0]})[^\s\"'\\]{{4,500}}(?={_MARK}\s*,\s*{_MARK}(?:key|name){_PAIR[0]}{NAMES}{_MARK})",
        r"(?i)(?P<keep>\{\s*\\?\"username\\?\"\s*:\s*\\?\"[^\"]{1,100}\"\s*,\s*\\?\"key\\?\"\s*:\s*\\?\")[^\"\\]{8,}",
        rf"(?i)(?P<keep>\b\w{{0,20}}Secret\w{{0,20}}\(\s*(?:value\s*=\s*)?{_MARK})[^\"'\n\\]{{4,}}",
        r"(?i)(?P<keep>\b(?:password|secret|api[_-]?key)s\\?[\"']?\s*[:=]\s*\[)[^\[\]\n]{4,5000}(?=\])",
        # files .netrc and .pgpass
        rf"(?im)(?P<keep>(?:\bmachine{_GAP}[^\s\\]{{1,200}}{_GAP}|\bdefault{_GAP}|^\s*)login{_GAP}[^\s\\]{{1,100}}"
        rf"{_GAP}password[ \t]+)(?!\(redacted\))[^\s\"'\\]{{4,}}",
        r"(?P<keep>(?<![\w/.*-])[\w.*-]{1,200}:(?:5432|6432|\*):[\w*$-]{1,100}:[\w*.@-]{1,100}:)[^\s:\"'\\]{4,}",
        # commands
        rf"(?i)(?P<keep>\b(?:docker|podman|helm|oc|az)\b[^\n]{{0,100}}?\blogin\b[^\n]{{0,200}}?\s-p[\s=]*(?:{_MARK})?){_MIXED}{{4,500}}",
        r"(?P<keep>\bsshpass\s+-p\s*[\"']?)[^\s\"']{4,}",
        r"(?P<keep>\bwandb\s+login\s+(?:--\S{1,40}\s+){0,4})[\w-]{32,}",
        r"(?P<keep>\b(?:curl|http|https)\b[^\n]{0,300}?\s(?:-u|--user|-a)[\s=]*[\"']?[^\s:\"']{1,80}:)[^\s\"']{4,}",
        r"(?P<keep>\bcurl\b[^\n]{0,300}?\s(?:-b|--cookie)[\s=]*[\"']?)[^\s\"'=]{1,100}=[^\s\"']{4,}",
        r"(?P<keep>\b(?:mysql|mysqldump|mariadb|7z|7za|rar|unrar)\b[^\n]{0,300}?\s-p)[^\s\"'-][^\s\"']{3,}",
        rf"(?P<keep>\b(?:mongo(?:sh|dump|restore)?\b[^\n]{{0,300}}?\s-p|redis-cli\b[^\n]{{0,300}}?\s-a|ldap[a-z]{{3,9}}\b[^\n]{{0,300}}?\s-w"
        rf"|(?:sqlcmd|bcp|zip)\b[^\n]{{0,300}}?\s-P|ssh-keygen\b[^\n]{{0,300}}?\s-N)[\s=]+{_MARK}?)[^\s\"'-][^\s\"']{{3,}}",
        r"(?P<keep>\b(?:smbclient|rpcclient)\b[^\n]{0,300}?\s-U\s*[\"']?[^\s%\"']{1,80}%)[^\s\"']{4,}",
        r"(?P<keep>\blftp\b[^\n]{0,300}?\s-u\s*[\"']?[^\s,\"']{1,80},)[^\s\"']{4,}",
        r"(?P<keep>\s-pass(?:in|out)?\s+[\"']?pass:)[^\s\"']{4,}",
        r"(?P<keep>\bhtpasswd\s+-[a-zA-Z]*b[a-zA-Z]*\s+(?:\S{1,200}\s+){1,2})[^\s\"'\\-][^\s\"'\\]{3,}(?=\s*(?:$|[\n\"'\\]))",
        r"(?P<keep>\bmc\s+(?:alias|config\s+host)\s+(?:set|add)\s+\S{1,100}\s+\S{1,300}\s+\S{3,100}\s+)[^\s\"'\\]{4,}",
        rf"(?P<keep>\bkubectl\b[^\n]{{0,300}}?--from-literal[\s=]+{_MARK}?[\w.-]{{1,100}}=)[^\s\"']{{4,}}",
        rf"(?P<keep>\becho\s+(?:-n\s+)?{_MARK}?)[^\s\"'|]{{4,500}}(?={_MARK}?\s*\|\s*(?:sudo\s+-S|[^\n|]{{0,200}}--?pass(?:word)?-stdin))",
    )
)
_WORDS = (
    r"(?i)pass|pwd|secret|token(?!s|iz|_(?!file))|key|connection|credential|auth|signature|cookie|bearer|basic|://|curl|https?\b"
    r"|mysql|mariadb|wandb|login|[?&](?:sig|code|sas|hmac)="
)
_RARE_WORDS = (
    ":5432:", ":6432:", ":*:", ":aa", ".atlasv1.", "-us", "jdbc:", "sqlplus", "smbclient", "rpcclient", "kubectl",
    "sudo -s", "mongo", "ldap", "redis-cli", "sqlcmd", "bcp ", "lftp", "mc alias", "mc config", "7z", "rar ", "zip ",
    "pw:", "pw=", "pw\"", "pw'", "_pat=", "_pat:", "_pat\"", "_pat'", "honeycomb", "saml",
)  # fmt: skip
_SEARCHED = re.compile(_WORDS)
_SEARCHED_RARE = re.compile(f"{_WORDS}|{'|'.join(map(re.escape, _RARE_WORDS))}")
"""Finds a word of any pattern above, also the rare ones. It is slower, so it searches only texts with a rare word."""
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
    """The text without secrets of a known form."""
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
    done, lowered = 0, text.lower()
    words = _SEARCHED_RARE if any(word in lowered for word in _RARE_WORDS) else _SEARCHED
    while (found := words.search(text, done)) is not None:
        begin = max(done, text.rfind("\n", 0, found.start()) + 1)
        end = _end_of_line(text, _end_of_line(text, found.end()))
        # if the last line of the piece has a word, the piece is extended by the next line
        while (again := words.search(text, max(begin, text.rfind("\n", 0, end - 1) + 1), end)) is not None:
            if end == (end := _end_of_line(text, _end_of_line(text, again.end()))):
                break
        yield text[done:begin]
        yield _by_line_patterns(text[begin:end])
        done = end
    yield text[done:]


def _end_of_line(text: str, place: int) -> int:
    return (text.find("\n", place) + 1) or len(text)


def _by_line_patterns(text: str) -> str:
    for pattern in (_HEADER, _QUOTED, _NAMED, _OPTION, _LISTED, _SPACED, _ELEMENT):
        text = pattern.sub(_without_value, text)
    for pattern in (_ANY_KEY, *_OTHERS):
        text = pattern.sub(rf"\g<keep>{REDACTED}", text)
    return text


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if _NUMBER.fullmatch(value) and not _PASSWORD_NAME.search(name):
        return match[0]
    if name.lower().endswith("pwd") and value.startswith(("/", "~", "$")):
        return match[0]  # PWD or OLDPWD: a working directory, not a password
    return match["keep"] + REDACTED


def _without_data(match: re.Match[str]) -> str:
    return match["keep"] + (f"{match['indent']}  {REDACTED}\n" if "indent" in match.re.groupindex else REDACTED)
