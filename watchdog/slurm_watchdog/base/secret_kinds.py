"""Secrets of users as they are written in logs, command lines, paths and variables: one row for each kind.

A row is tried where one of its `needles` (lower case) is in the text; what its expression's group `secret`
matches is masked, and the rest stays readable. Every repetition has an upper bound and every expression
begins with a fixed text or a border, so that the time is linear in the text. `samples` are how it is met in
life; the tests fill `{alphabet:length}` with random characters and look for these.

Sources: the vendors' documentation of their formats, and the public rule sets of gitleaks 8.18 and GitHub's
secret scanning. Bare hexadecimal words are hashes of commits, files and caches far more often than keys: they
are masked only near a word that says key (row `hexadecimal_key`), and kept otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from slurm_watchdog.base.late_regex import late_regex

Test = Callable[[re.Match[str]], bool]


class SecretKind(msgspec.Struct, frozen=True):
    """One way to write a secret."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    samples: tuple[str, ...]
    is_secret: Test | None = None  # A last look at what the expression matched; None: it is enough.
    in_long_word: bool = False
    """It stands in a word of LONG_WORD characters and more: without such a word the row is skipped."""


LONG_WORD = 20

_START = r"(?<![A-Za-z0-9])"
_END = r"(?![A-Za-z0-9_-])"
_QUOTED = r"(?:\"[^\"]{1,512}\"|'[^']{1,512}'|[^\s&'\",;]{1,512})"
# fmt: off
_PLAIN_WORDS = frozenset((
    "none", "null", "nil", "true", "false", "str", "int", "bytes", "string", "bool",
    "optional", "required", "yes", "no", "empty", "unset", "missing", "invalid",
    "incorrect", "authentication", "expired", "wrong", "not", "is", "was", "the", "a",
    "for", "from", "with", "changed",
))
# fmt: on
_NO_TOKEN = late_regex(
    r"(?:eos|bos|pad|unk|sep|cls|mask|image|next|last|first|prev|num|max|min|new|special|per|stop|start|end|of|the|added|unknown)[ _-]?$",
    re.IGNORECASE,
)
_HASH = late_regex(
    r"(?:commit|revision|\brev|sha\d*|\bgit|hash|digest|version|checksum|md5|cache|snapshots?)\W{0,4}\w{0,12}\W{0,3}$",
    re.IGNORECASE,
)


_PLACEHOLDER = late_regex(r"%[sdr]|%\(\w+\)s|\$\{?\w+\}?|<[^>]*>?|\{[^}]*\}?|\*+|/[\w./-]+")


def _value(match: re.Match[str]) -> bool:
    """Behind a name that says password: whatever is no plain word of programs, no path and no placeholder."""
    value = match["secret"].strip("'\"")
    if len(value) < 3 or value.lower().rstrip(".,:;)") in _PLAIN_WORDS or _PLACEHOLDER.fullmatch(value):
        return False
    return not value.startswith(("os.environ", "os.getenv", "self.", "args.", "Optional", "Union", "getpass"))


def _mixed(match: re.Match[str]) -> bool:
    """Letters and digits, as generated words have them and names of things rarely do."""
    value = match["secret"]
    if any(c.isdigit() for c in value):
        return any(c.isalpha() for c in value)
    return len(value) >= 16 and _cased(match)


def _cased(match: re.Match[str]) -> bool:
    value = match["secret"]
    return any(c.isupper() for c in value) and any(c.islower() for c in value)


def _token(match: re.Match[str]) -> bool:
    """Behind `token`: no token of a vocabulary, no count of tokens."""
    assigned = match.string[match.start("secret") - 1] == "=" and not match["secret"].isdecimal()
    return (assigned or _mixed(match)) and not _NO_TOKEN.search(match.string, max(0, match.start() - 12), match.start())


def _no_hash(match: re.Match[str]) -> bool:
    at = match.start("secret")
    return not _HASH.search(match.string, max(0, at - 24), at)


def _not_a_path(match: re.Match[str]) -> bool:
    value = match["secret"].strip("'\"")
    cache = match.string[: match.start()].lower().endswith("cache")
    return value[:1] not in "/.$<{~" and _mixed(match) and not cache


def _row(
    name: str, needles: str, regex: str, *samples: str, is_secret: Test | None = None, flags: int = 0
) -> SecretKind:
    return SecretKind(name, tuple(needles.split("|")), late_regex(regex, flags), samples, is_secret)


def _prefixed(name: str, prefixes: str, rest: str, *samples: str, is_secret: Test | None = None) -> SecretKind:
    """A token that begins with one of `prefixes`, which say what it is."""
    words = prefixes.split("|")
    regex = late_regex(rf"{_START}(?P<secret>(?:{'|'.join(map(re.escape, words))}){rest})")
    return SecretKind(name, tuple(word.lower() for word in words), regex, samples, is_secret, in_long_word=True)


_I = re.IGNORECASE

# fmt: off
KINDS: tuple[SecretKind, ...] = (
    # whole texts first: a key over several lines begins here and continues in redact.mask_lines
    _row("private_key", "private key", r"(?P<secret>-----BEGIN[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.{0,16384}?(?:-----END[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|$))",
         "-----BEGIN OPENSSH PRIVATE KEY-----\\n{b64:64}\\n{b64:64}\\n-----END OPENSSH PRIVATE KEY-----", "key: '-----BEGIN RSA PRIVATE KEY-----\\nMII{b64:61}", flags=re.DOTALL),
    # addresses
    _row("address_with_password", "://", r"://(?P<secret>[^/\s:@'\"]{0,128}:[^/\s'\"]{1,256})@",
         "postgresql://train:{pw:14}@db.example.org:5432/runs", "redis://:{pw:16}@cache:6379/0", "mongodb+srv://app:{pw:18}@cluster0.example.net/x",
         "amqp://guest:{pw:12}@mq:5672//", "mysql+pymysql://u:{pw:12}@h/d", "https://me:{pw:20}@proxy.example.org:3128", "git clone https://oauth2:{b62:20}@gitlab.example.org/a/b.git"),
    _row("address_with_token", "://", r"://(?P<secret>[A-Za-z0-9_-]{16,256})@", "https://{hex:32}@o123456.ingest.example.io/4505", "https://{b62:40}@github.com/org/repo.git", is_secret=_mixed),
    _row("query_string", "?|&", r"[?&](?:amp;)?(?:x-amz-(?:signature|security-token|credential)|x-goog-(?:signature|credential)|(?:\w{1,24}[_-])?(?:api[_-]?key|token|key|secret|password|passwd|pwd|auth|signature|sig|code|jwt))=(?P<secret>[^&\s'\"<>#]{6,2048})",
         "GET https://api.example.org/v1/runs?api_key={b62:32}&page=2 401", "blob.core.windows.net/c/x.tar?sv=2022-11-02&sig={b64:43}%3D",
         "https://bucket.s3.amazonaws.com/o?X-Amz-Credential={upper:20}%2F20260101&X-Amz-Signature={hex:64}", "https://storage.googleapis.com/b/o?X-Goog-Signature={hex:128}", flags=_I),
    _row("slack_webhook", "hooks.slack.com", r"hooks\.slack\.com/(?:services|workflows|triggers)/(?P<secret>[\w/-]{16,256})", "https://hooks.slack.com/services/T{upper:10}/B{upper:10}/{b62:24}"),
    _row("discord_webhook", "/api/webhooks/", r"/api/webhooks/(?P<secret>\d{8,24}/[\w-]{20,128})", "https://discord.com/api/webhooks/{dec:18}/{b62:68}"),
    _row("teams_webhook", "webhook.office.com|logic.azure.com", r"(?:webhook\.office\.com|logic\.azure\.com(?::443)?)/(?P<secret>[^\s'\"]{16,512})", "https://x.webhook.office.com/webhookb2/{hex:8}-{hex:32}/IncomingWebhook/{hex:32}"),
    # clouds
    _prefixed("aws_access_key", "AKIA|ASIA|ABIA|ACCA", r"[A-Z0-9]{16}(?![A-Za-z0-9])", "An error occurred (InvalidAccessKeyId): AKIA{upper:16}", "Credential=ASIA{upper:16}/20260301/eu"),
    _row("aws_secret_key", "secret", r"secret[\w. -]{0,24}[\"']?\s{0,4}[=:]{1,2}>?\s{0,4}[\"']?(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
         "aws_secret_access_key = {b64:40}", "'SecretAccessKey': '{b64:40}'", flags=_I),
    _row("aws_session_token", "session", r"session[_ -]?token[\"']?\s{0,4}[=:]\s{0,4}[\"']?(?P<secret>[A-Za-z0-9/+=]{16,4096})", "aws_session_token = IQoJ{b64:200}", "SessionToken: 'FwoG{b64:120}'", flags=_I),
    _prefixed("gcp_api_key", "AIza", r"[\w-]{30,48}", "key=AIza{b62:35} is not valid"),
    _prefixed("gcp_oauth", "ya29.|GOCSPX-|1//0", r"[\w.-]{20,1024}", "invalid token ya29.{b62:120}", "client GOCSPX-{b62:28}", "refresh 1//0{b62:60}"),
    _row("gcp_service_account", "private_key_id", r"private_key_id[\"']?\s{0,4}[=:]\s{0,4}[\"']?(?P<secret>[0-9a-f]{16,64})", "\"private_key_id\": \"{hex:40}\","),
    _row("azure_account_key", "accountkey|sharedaccesskey|accesskey=", r"(?:AccountKey|SharedAccessKey|AccessKey)=(?P<secret>[A-Za-z0-9+/=]{16,256})",
         "DefaultEndpointsProtocol=https;AccountName=train;AccountKey={b64:86}==;EndpointSuffix=core.windows.net", "Endpoint=sb://x.example.net/;SharedAccessKeyName=r;SharedAccessKey={b64:43}=", flags=_I),
    _row("azure_client_secret", "8q~", rf"(?P<secret>(?<![\w~.-])[\w~.-]{{3}}8Q~[\w~.-]{{31,34}}){_END}", "AADSTS7000215: invalid client secret abc8Q~{b62:34}"),
    _prefixed("digitalocean", "dop_v1_|doo_v1_|dor_v1_", r"[0-9a-f]{32,80}", "token dop_v1_{hex:64}"),
    _prefixed("heroku", "HRKU-", r"[\w-]{16,80}", "HRKU-{b62:60}"),
    _row("heroku_uuid", "heroku", r"heroku[^\n]{0,32}?(?P<secret>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", "HEROKU_API_KEY={hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}", flags=_I),
    _prefixed("alibaba", "LTAI", r"[A-Za-z0-9]{12,32}", "AccessKeyId LTAI{b62:20} not found", is_secret=_mixed),
    # forges and registries
    _prefixed("github_classic", "ghp_", r"[A-Za-z0-9]{16,255}", "fatal: could not read from ghp_{b62:36}"),
    _prefixed("github_fine_grained", "github_pat_", r"\w{16,255}", "github_pat_{b62:22}_{b62:59}"),
    _prefixed("github_oauth", "gho_", r"[A-Za-z0-9]{16,255}", "gho_{b62:36}"),
    _prefixed("github_app", "ghu_|ghs_|ghr_", r"[A-Za-z0-9]{16,255}", "ghs_{b62:36} has expired", "ghu_{b62:36}", "ghr_{b62:76}"),
    _prefixed("gitlab", "glpat-|gldt-|glrt-|glcbt-|glptt-|glft-|glsoat-|glagent-", r"[\w.-]{16,255}", "remote: glpat-{b62:20} denied", "glrt-{b62:20}", "glcbt-{hex:2}_{b62:20}"),
    _prefixed("npm", "npm_", r"[A-Za-z0-9]{30,80}", "//registry.example.org/:_authToken=npm_{b62:36}"),
    _prefixed("pypi", "pypi-Ag", r"[\w-]{16,512}", "twine upload -p pypi-AgEIcHlwaS5vcmc{b62:120}"),
    _prefixed("rubygems", "rubygems_", r"[0-9a-f]{32,64}", "rubygems_{hex:48}"),
    _prefixed("docker", "dckr_pat_|dckr_oat_", r"[\w-]{16,255}", "docker login: dckr_pat_{b62:27}"),
    _row("docker_config", "\"auth\"", r"\"auth\"\s{0,4}:\s{0,4}\"(?P<secret>[A-Za-z0-9+/=]{8,2048})\"", "{{\"auths\": {{\"nvcr.io\": {{\"auth\": \"{b64:60}\"}}}}}}"),
    _prefixed("artifactory", "AKCp", r"[A-Za-z0-9]{60,80}", "X-JFrog-Art-Api: AKCp{b62:69}"),
    # machine learning
    _prefixed("hugging_face", "hf_|api_org_", r"[A-Za-z0-9]{20,80}", "401 Client Error: hf_{b62:34}", "api_org_{b62:34}", is_secret=_cased),
    _prefixed("anthropic", "sk-ant-", r"[\w-]{20,255}", "x-api-key sk-ant-api03-{b62:93}AA"),
    _prefixed("openai", "sk-", r"[\w-]{20,255}", "Incorrect API key provided: sk-{b62:48}", "sk-proj-{b62:60}", "sk-svcacct-{b62:80}", is_secret=_mixed),
    _prefixed("wandb", "wandb_v1_", r"\w{20,255}", "wandb login wandb_v1_{b62:72}"),
    _row("hexadecimal_key", "wandb|key|secret|token|login|auth|passw|credential|datadog|comet|neptune|kaggle|twilio|mlflow|cloudflare",
         r"(?:wandb|comet(?:_ml)?|neptune|mlflow|datadog|kaggle|twilio|cloudflare|(?:api|app|access|license|account|auth|private|ssh)[_ -]?key|[a-z0-9]_key\b|secret|token(?!iz|s)|log(?:in|ged)|auth(?!or)|passw|credential)"
         r"[^\n]{0,48}?(?<![A-Za-z0-9])(?P<secret>[0-9a-f]{32,80})(?![A-Za-z0-9])",
         "wandb login --relogin {hex:40}", "WANDB_API_KEY={hex:40}", "wandb: ERROR api_key not configured, got {hex:40}", "DD_API_KEY={hex:32}", "TWILIO_AUTH_TOKEN {hex:32}", "Invalid token: {hex:64}", is_secret=_no_hash, flags=_I),
    _row("comet", "comet", r"comet[\w. -]{0,24}key[\"']?\s{0,4}[=:]\s{0,4}[\"']?(?P<secret>[A-Za-z0-9]{16,64})", "COMET_API_KEY={b62:25}", "comet_ml.init(comet_api_key='{b62:25}')", flags=_I),
    _row("neptune", "eyjh", rf"{_START}(?P<secret>eyJh[A-Za-z0-9+/=_-]{{40,2048}})", "NeptuneInvalidApiToken: eyJhcGlfYWRkcmVzcyI6{b64:120}"),
    _row("mlflow", "mlflow", r"mlflow_tracking_(?:token|password)[\"']?\s{0,4}[=:]\s{0,4}[\"']?(?P<secret>[^\s'\"]{3,512})", "MLFLOW_TRACKING_TOKEN={b62:32}", "MLFLOW_TRACKING_PASSWORD={pw:12}", flags=_I),
    _row("kaggle", "\"key\"|'key'|kaggle", r"(?:[\"']key[\"']\s{0,4}:\s{0,4}[\"']|KAGGLE_KEY=[\"']?)(?P<secret>[0-9a-f]{32})(?![0-9a-f])", "{{\"username\":\"u\",\"key\":\"{hex:32}\"}}", "KAGGLE_KEY={hex:32}"),
    _prefixed("nvidia", "nvapi-", r"[\w-]{20,255}", "NGC: invalid key nvapi-{b62:64}"),
    _prefixed("databricks", "dapi", r"[0-9a-f]{32}(?:-\d)?", "Databricks: dapi{hex:32}"),
    _prefixed("replicate", "r8_", r"[A-Za-z0-9]{30,60}", "r8_{b62:37}"),
    _prefixed("groq", "gsk_", r"[A-Za-z0-9]{30,80}", "gsk_{b62:52}"),
    _prefixed("perplexity", "pplx-", r"[A-Za-z0-9]{30,80}", "pplx-{b62:48}"),
    _prefixed("xai", "xai-", r"[A-Za-z0-9]{30,100}", "xai-{b62:80}"),
    # messages, payments, operations
    _prefixed("slack", "xoxa-|xoxb-|xoxe-|xoxe.|xoxo-|xoxp-|xoxr-|xoxs-|xoxc-|xoxd-|xapp-", r"[\w.%-]{8,512}", "slack_sdk: xoxb-{dec:12}-{dec:12}-{b62:24}", "xapp-1-A{upper:10}-{dec:13}-{hex:64}"),
    _row("discord", ".", rf"{_START}(?P<secret>[MNO][\w-]{{23,27}}\.[\w-]{{6}}\.[\w-]{{27,40}}){_END}", "discord: improper token MTk4{b62:22}.{b62:6}.{b62:38}", is_secret=_mixed),
    _row("telegram", ":aa", rf"{_START}(?:bot)?(?P<secret>\d{{8,10}}:AA[\w-]{{30,40}})", "api.telegram.org/bot{dec:10}:AA{b62:33}/sendMessage"),
    _prefixed("stripe", "sk_live_|sk_test_|rk_live_|rk_test_|whsec_", r"[A-Za-z0-9]{16,255}", "sk_live_{b62:24}", "whsec_{b62:32}"),
    _prefixed("sendgrid", "SG.", r"[\w-]{16,32}\.[\w-]{32,64}", "SG.{b62:22}.{b62:43}"),
    _prefixed("twilio", "SK", r"[0-9a-f]{32}(?![0-9a-f])", "twilio SK{hex:32}"),
    _prefixed("mailgun", "key-", r"[0-9a-f]{32}(?![0-9a-f])", "mailgun key-{hex:32}"),
    _prefixed("new_relic", "NRAK-|NRJS-|NRII-|NRRA-", r"[\w-]{16,64}", "NRAK-{upper:27}"),
    _prefixed("sentry", "sntrys_|sntryu_", r"[\w+/=-]{32,512}", "sntrys_{b64u:120}", "sntryu_{hex:64}"),
    _prefixed("grafana", "glsa_|glc_", r"[\w+/=-]{16,512}", "grafana: glsa_{b62:32}_{hex:8}", "glc_{b64:100}"),
    _prefixed("vault", "hvs.|hvb.|hvr.", r"[\w-]{20,512}", "X-Vault-Token: hvs.{b62:90}", "hvb.{b62:140}"),
    _prefixed("terraform", "atlasv1.", r"[\w-]{20,128}", "{b62:14}.atlasv1.{b62:60}".removeprefix("{b62:14}.")),
    _prefixed("tailscale", "tskey-", r"[\w-]{16,128}", "tskey-auth-{b62:12}CNTRL-{b62:32}"),
    _prefixed("atlassian", "ATATT3|ATCTT3", r"[\w=-]{40,512}", "ATATT3{b62:180}"),
    _prefixed("linear_notion", "lin_api_|ntn_", r"[A-Za-z0-9]{30,80}", "lin_api_{b62:40}", "ntn_{b62:46}"),
    _prefixed("shopify", "shpat_|shpca_|shppa_|shpss_", r"[0-9a-f]{32}", "shpat_{hex:32}"),
    _prefixed("pulumi", "pul-", r"[0-9a-f]{40}", "pul-{hex:40}"),
    _prefixed("age", "AGE-SECRET-KEY-1", r"[A-Z0-9]{50,64}", "AGE-SECRET-KEY-1{upper:58}"),
    _row("json_web_token", "eyj", r"(?<![\w-])(?P<secret>eyJ[\w-]{8,8192}\.[\w.-]{8,8192})", "invalid signature: eyJhbGciOiJIUzI1NiJ9.eyJ{b64u:80}.{b64u:43}"),
    # headers
    _row("authorization_header", "authorization", r"authorization[\"']?\s{0,4}[=:]\s{0,4}[\"']?(?:bearer|basic|token|digest|negotiate|apikey|bot)?\s{0,4}(?P<secret>[^\s'\",]{8,4096})",
         "'Authorization': 'Bearer {b62:40}'", "Authorization: Basic {b64:32}", "> Authorization: token {b62:40}", is_secret=_value, flags=_I),
    _row("bearer", "bearer", r"\bbearer\s{1,4}(?P<secret>[\w.~+/=-]{8,4096})", "401: bearer {b62:43}", is_secret=_mixed, flags=_I),
    _row("basic", "basic ", r"\bbasic\s{1,4}(?P<secret>[A-Za-z0-9+/]{12,512}={0,2})(?![\w=-])", "curl -H 'Proxy-Authorization: Basic {b64:24}=='", is_secret=lambda m: _mixed(m) and _cased(m), flags=_I),
    _row("cookie", "cookie", r"cookie2?[\"']?\s{0,4}[:=]\s{0,4}(?P<secret>[^\s;=]{1,64}=[^\n'\"]{8,2048})", "Set-Cookie: session={b62:40}; HttpOnly", flags=_I),
    # command lines
    _row("option", "--", r"--[\w.-]{0,32}(?:password|passwd|passphrase|token|secret|api[_-]?key|access[_-]?key|auth[_-]?key|credentials?)(?:=|\s{1,4})(?P<secret>(?!-)" + _QUOTED + ")",
         "python train.py --password {pw:10} --epochs 3", "--hf-token={b62:20}", "wandb.py --api-key {b62:24}", "tool --db.password '{pw:9}'", is_secret=lambda m: _value(m) and ("token" not in m[0].lower() or _mixed(m)), flags=_I),
    _row("mysql", "mysql|maria", r"(?:mysql|mysqldump|mysqladmin|mariadb(?:-dump)?)\b[^\n|;]{0,160}?\s-p(?P<secret>[^\s'\"-][^\s'\"]{2,128})", "mysql -h db -u root -p{pw:12} runs", "mysqldump -p{pw:9} runs"),
    _row("curl", "-u|--user|--proxy-user", r"(?:curl|wget|http|xh)\b[^\n|;]{0,160}?\s(?:-u|--user|--proxy-user|-U)[= ]{0,2}[\"']?[^\s:'\"]{1,128}:(?P<secret>[^\s'\"]{1,256})", "curl -s -u admin:{pw:10} https://x/y", "curl --user a:{pw:8} x"),
    _row("sshpass", "sshpass|redis-cli|rclone|ldapsearch|smbclient", r"(?:sshpass\s{1,4}-p|redis-cli\b[^\n]{0,160}?\s-a|ldapsearch\b[^\n]{0,160}?\s-w)\s{0,4}(?P<secret>" + _QUOTED + ")", "sshpass -p {pw:10} ssh n1", "redis-cli -h r -a {pw:16} ping"),
    _row("htpasswd_pair", "username=", r"username=[^\s,;&]{1,128}[,;]\s{0,2}password=(?P<secret>[^\s,;&]{3,256})", "mount.cifs -o username=me,password={pw:10},vers=3.0", flags=_I),
    # files
    _row("netrc", "password", r"(?:login|machine)\s[^\n]{0,160}?\bpassword\s{1,4}(?P<secret>\S{3,256})", "machine api.wandb.ai login user password {hex:40}", "login u password {pw:12}", is_secret=_value, flags=_I),
    # names that say it, whatever the secret looks like
    _row("named_secret", "passw|pwd|passphrase|secret|key|credential|auth",
         r"(?:passw(?:or)?d|passphrase|(?<![a-z])pwd|secret|api[_-]?key|apikey|access[_-]?key|account[_-]?key|private[_-]?key|signing[_-]?key|encryption[_-]?key|auth[_-]?(?:token|key)|credentials?)\w{0,24}[\"']?\s{0,4}(?:=>|[=:])\s{0,4}(?P<secret>" + _QUOTED + ")",
         "db_password={pw:10}", "{{'api_key': '{b62:24}', 'model': 'x'}}", "client_secret: {b62:30}", "PGPASSWORD={pw:12}", "Password={pw:10};Server=x", "rpc(passphrase='{pw:14}')", is_secret=_value, flags=_I),
    _row("named_token", "token", r"token[\"']?\s{0,4}(?:=>|[=:])\s{0,4}[\"']?(?P<secret>[\w.~+/=-]{8,4096})", "hub_token={b62:20}", "\"access_token\": \"{b62:64}\"", "_authToken={b62:32}", is_secret=_token, flags=_I),
    _row("named_key", "_key", r"(?<=[A-Z0-9])_KEY[\"']?\s{0,2}[=:]\s{0,2}(?P<secret>" + _QUOTED + ")", "LAMBDA_CLOUD_KEY={b62:24}", "export NGC_CLI_KEY='{b62:40}'", is_secret=_not_a_path),
)
# fmt: on
