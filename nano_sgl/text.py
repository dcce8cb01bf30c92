"""Text: one request's token ids become text as they come, and nothing that was handed out is ever taken back.

A token is not a piece of text. A character may be spread over several tokens, a word's leading blank may depend on the token
before it, and a stop string may begin in one token and end three later. So the text of a request has three parts:

      ids      12  907  33  33  5  |  71   226 158 153
      text     "One, two "            "th"  ?            "the" is a stop string, 226 158 153 are bytes that wait for a fourth
               ---------------------  ----  -----------
               handed out             held  not certain

  whole      A byte-level decoder only joins bytes: where no character is unfinished, a token of whole characters adds its own text, which is
             looked up (`_pieces`), and nothing is decoded. All below is for the others: parts of characters, and other decoders.
  certain    The last ids (`_window`) are decoded together and what is new is added. Uncertain are a replacement character at the
             end, which may turn into a character, and a run of byte tokens (`<0xE3>`, Llama 2) until another token follows: one
             bad byte makes replacement characters of the whole run.
  window     Decoding starts again a few ids back, wherever a cut may fall: through a character, where a decoder drops a leading
             blank or spells `##`. That garbles the first characters of the kept text, which are out already. A cut counts if all
             that follows them reads the same as before, and how much of the kept text is new is counted from its end.
  stops      Each stop string is an automaton that reads every new character once: its state is how much of the string the text
             ends with, so it says both what matches and what must be held. Patterns are searched from where their last partial
             match began, with a deadline. The match that starts first cuts the text.

Invariant: the pieces of `take` joined are `text`, and without stops `text` is the decoding of all ids at once, special tokens
left out. What came before `min_tokens` is never searched: no stop begins in it.
Cost: a look into a dict a token, else one or two decodes of 4 to 8 ids (3 us each), no matter how long the text is; a stop string
costs O(1) a character, amortised, however long and repetitive. A pattern costs what it costs, at most a second a request; then `push` raises
TimeoutError.
Stops holding: a run of more than 32 byte tokens is handed out before its end, and if a bad byte follows, the good part stays as
it is. A character at the end of a byte run is searched one token late. Which stop completes first is known by the token, not by
the character. `clean_up_tokenization_spaces` (old WordPiece models) is not applied.
Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977); SGLang and vLLM keep such a window as a pair of offsets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import regex
from tokenizers import decoders

from .protocol import SamplingParams

WINDOW = 8                      # ids decoded together before the first try to cut; half of them stay
MAX_WINDOW = 256                # ids after which a cut is not checked any more: a decoder that is not known here
GARBLED = 3                     # characters at the start of a cut window that may read differently: at most 3 bytes of one
UNCERTAIN = 3                   # replacement characters at the end that may still become one character
MAX_RUN = 32                    # byte tokens that wait for the end of their run
KEPT = 4096                     # characters before the held ones that stay in one string with them, for patterns that look back;
SHOWN = 256                     # and where there are none, for `take`: a string grows by being copied
SEARCH_SECONDS = 0.05           # one search of a pattern
TOTAL_SEARCH_SECONDS = 1.0      # all searches of a request, CPU time


class TextStream:
    """Ids in, text out, for one request: incremental detokenisation, stop strings and patterns, stop ids, length.

    `push` takes one token and says why the request ends, if it does; `take` hands out text. `count` is the number of tokens
    pushed, `text` what is certain so far, `stop_reason` the stop string, the text a pattern matched, or the stop id.
    """

    def __init__(self, tokenizer, params: SamplingParams, end_ids: Iterable[int], max_new: int):
        """`tokenizer`: a fast one of transformers; `end_ids` end the text unless `params.ignore_eos`, `max_new` tokens always."""
        self._backend, self.params = tokenizer.backend_tokenizer, params
        special, self._bytes, whole = _read_tokenizer(self._backend)
        self._skipped = special if params.skip_special_tokens else frozenset()
        self._pieces = whole[params.skip_special_tokens]    # id -> its text, where that is certain whatever comes before
        self._min, self._max, self._no_trim = params.min_tokens, max_new, params.no_stop_trim
        self._stop_ids = frozenset() if params.ignore_eos else frozenset(end_ids) | frozenset(params.stop_token_ids or ())
        self._words = [StopString(word) for word in params.stop_strings()]
        self._patterns = params.stop_patterns()
        self._searches = bool(self._words or self._patterns)
        self._kept = KEPT if self._patterns else SHOWN
        self._starts = [0] * len(self._patterns)    # where in the text each pattern's next search begins
        self._searched_s = 0.0                      # CPU seconds that patterns have taken
        self.count = 0
        self.stop_reason: str | int | None = None
        self._window: list[int] = []                # the last ids; skipped ones never enter
        self._limit = WINDOW                        # length of the window at which it is cut
        self._shown = 0                             # characters of the window's text that are in `text`
        self._run = bytearray()                     # the byte tokens at the window's end
        self._past: list[str] = []                  # the text, long searched and held no more,
        self._past_chars = 0
        self._recent = ""                           # and its last thousands of characters
        self._searched = self._held = self._sent = 0    # text[:_searched] was searched, [:_held] begins no stop, [:_sent] is out

    @property
    def text(self) -> str:
        """All text that is certain, cut at a stop that was found."""
        return "".join(self._past) + self._recent

    def push(self, token: int) -> str | None:
        """One more token; "stop" or "length" if the request ends with it. Raises TimeoutError if a pattern searches too long."""
        self.count += 1
        is_stop = token in self._stop_ids
        if not is_stop or self._no_trim:            # else its text is no part of the answer
            piece = None if self._window else self._pieces[token]
            if piece is None:
                self._add(token)
            else:
                self._recent += piece
        is_last = is_stop or self.count >= self._max
        if is_last and self._window:
            self._show(self._window)                # what was not certain is final now, and may complete a stop string
        if self._searches:
            if self.count >= self._min:
                if self._search():
                    return "stop"
            else:
                self._skip_search()
        if len(self._recent) > 2 * self._kept:
            self._forget()
        if is_stop:
            self.stop_reason = token
        return "stop" if is_stop else "length" if is_last else None

    def take(self, final: bool = False) -> str:
        """Text that is certain, cannot begin a stop and was not taken yet; `final`: everything there will be."""
        if final and self._window and not isinstance(self.stop_reason, str):
            self._show(self._window)                # bytes that will never become a character come out as what they are
        start, end = self._sent, self._held if self._searches and not final else self._past_chars + len(self._recent)
        if start >= end:
            return ""
        self._sent = end
        if start >= self._past_chars:
            return self._recent[start - self._past_chars:end - self._past_chars]
        return self.text[start:end]                 # nobody has asked for long

    def push_whole(self, tokens: list[int]) -> str | None:
        """`push`, of tokens like most: pieces of their own that end nothing, where nothing is searched for. Their text; None, and nothing is done,
        where it is not like that."""
        if self._searches or self._window or self.count + len(tokens) >= self._max or not self._stop_ids.isdisjoint(tokens):
            return None
        if len(tokens) == 1:
            text = self._pieces[tokens[0]]
        else:
            pieces = [self._pieces[token] for token in tokens]
            text = None if None in pieces else "".join(pieces)
        if text is None:
            return None
        self.count += len(tokens)
        self._recent += text
        if len(self._recent) > 2 * self._kept:
            self._forget()
        return text

    def pass_on(self, tokens: list[int]) -> str | None:
        """`push_whole` and `take` in one, where all that is certain is out."""
        if self._sent != self._past_chars + len(self._recent) or (text := self.push_whole(tokens)) is None:
            return None
        self._sent += len(text)
        return text

    def skip(self, other: TextStream) -> None:
        """Do not hand out what another stream has handed out of the same text."""
        self._sent = other._sent

    # ---- ids to text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _add(self, token: int) -> None:
        """Put a token that is no piece of its own into the window, and what it makes certain into the text."""
        if token in self._skipped or self._backend.id_to_token(token) is None:   # a model's vocabulary may be padded
            return
        self._window.append(token)
        byte = self._bytes.get(token)
        if byte is not None:
            self._run.append(byte)
            if len(self._run) > MAX_RUN:
                self._shorten_run()
            return
        self._run.clear()
        whole = self._decode(self._window)
        certain = len(whole)
        if whole.endswith("\ufffd"):
            certain = max(len(whole.rstrip("\ufffd")), certain - UNCERTAIN)
        if certain > self._shown:
            self._recent += whole[self._shown:certain]
            self._shown = certain
        if certain == len(whole) and self._pieces.backend is not None:
            self._window, self._shown = [], 0
        elif len(self._window) >= self._limit:
            self._cut(whole)

    def _show(self, ids: list[int]) -> None:
        """Take the text of `ids`, the beginning of the window or all of it, for certain."""
        whole = self._decode(ids)
        self._recent += whole[self._shown:]
        self._shown = max(self._shown, len(whole))

    def _cut(self, whole: str) -> None:
        """Keep the second half of the window, whose text is `whole`, if it decodes to the same alone; else wait for twice the ids."""
        kept = self._window[-(self._limit // 2):]
        text, uncertain = self._decode(kept), len(whole) - self._shown
        if len(self._window) < MAX_WINDOW and not (len(text) - GARBLED >= uncertain and whole.endswith(text[GARBLED:])):
            self._limit *= 2
            return
        self._window, self._shown, self._limit = kept, max(0, len(text) - uncertain), WINDOW

    def _shorten_run(self) -> None:
        """Show a long run of byte tokens before its end, and keep of it in the window what decides how its next byte reads."""
        run, start = self._run, len(self._window) - len(self._run)
        unfinished, bad = _end_of_run(run)
        self._show(self._window[:len(self._window) - unfinished])
        if bad is not None:                         # each byte is a replacement character; two equal ones >= 0x80 are bad, too
            self._window[start:], self._run = [self._window[start + bad]] * 2, run[bad:bad + 1] * 2
        else:                                       # the last whole character stays in front of the unfinished one
            size = len(run[:len(run) - unfinished].decode()[-1].encode()) + unfinished
            self._window[start:], self._run = self._window[-size:], run[-size:]
        self._shown = len(self._decode(self._window[:len(self._window) - unfinished]))

    # ---- stops

    def _skip_search(self) -> None:
        """Below min_tokens: what is there, and the whole characters of a run of bytes, will never be searched."""
        self._held = self._searched = self._past_chars + len(self._recent)
        if self._run:
            unfinished, _ = _end_of_run(self._run)
            self._searched += max(0, len(self._decode(self._window[:len(self._window) - unfinished])) - self._shown)
        self._starts = [self._searched] * len(self._starts)

    def _search(self) -> bool:
        """Look for stops in what is new. Cuts the text at the one that starts first, or notes from where on one may begin."""
        text, base = self._recent, self._past_chars
        end, at = base + len(text), self._searched
        if at >= end:
            self._held = end if at > end else self._held     # at > end: min_tokens passed over what is to come
            return False
        held, found = end, []                       # matches: (start, end, reason) in `_recent`
        for word in self._words:
            stop = word.read(text, at - base)
            if stop is not None:
                found.append((stop - len(word.word), stop, word.word))
            held = min(held, end - word.state)
        for i, pattern in enumerate(self._patterns):
            match = self._match(pattern, self._starts[i] - base)
            if match and not match.partial:
                found.append((match.start(), match.end(), match.group()))
            self._starts[i] = base + match.start() if match else end
            held = min(held, self._starts[i])
        self._searched, self._held = end, held
        if not found:
            return False
        start, stop, self.stop_reason = min(found)
        self._recent = text[:stop if self._no_trim else start]
        self._held = self._searched = base + len(self._recent)
        return True

    def _match(self, pattern: regex.Pattern, start: int) -> regex.Match | None:
        """The pattern's first match in `_recent[start:]`, else the longest beginning of one at its end."""
        left = TOTAL_SEARCH_SECONDS - self._searched_s
        if left <= 0:
            raise TimeoutError("stop_regex has used up the request's time for searching")
        began = time.thread_time()
        try:
            return pattern.search(self._recent, start, partial=True, timeout=min(SEARCH_SECONDS, left))
        finally:
            self._searched_s += time.thread_time() - began

    def _forget(self) -> None:
        """Move text that is neither held nor near it out of the string that grows and is searched."""
        spare = (self._held - self._past_chars if self._searches else len(self._recent)) - self._kept
        if spare > 0:
            self._past.append(self._recent[:spare])
            self._past_chars += spare
            self._recent = self._recent[spare:]


class StopString:
    """An automaton that reads a text once and always knows how much of `word` the text ends with (`state`, in characters)."""

    def __init__(self, word: str):
        """`word` is not empty. Costs nothing: the table grows with the longest beginning of the word that is met."""
        self.word, self.state = word, 0
        self._border = [0, 0]                       # [k]: the longest beginning of word[:k], shorter than k, that it ends with

    def read(self, text: str, at: int) -> int | None:
        """Read text[at:], which continues what was read before; the index behind the first occurrence, or None."""
        word, border, state = self.word, self._border, self.state
        while at < len(text):
            if state == 0:                          # most of the time: nothing matches, and `find` is fast
                at = text.find(word[0], at)
                if at < 0:
                    break
                state = 1
            else:
                while state and word[state] != text[at]:
                    state = border[state]
                state += word[state] == text[at]
            at += 1
            if state == len(word):
                self.state = 0
                return at
            if state == len(border):
                last, k = word[state - 1], border[state - 1]
                while k and word[k] != last:
                    k = border[k]
                border.append(k + (word[k] == last))
        self.state = state
        return None


def _end_of_run(run: bytearray) -> tuple[int, int | None]:
    """How many bytes at the end only begin a character; and where the first byte is that no further byte can make good, if any."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return (len(run) - error.start, None) if error.reason == "unexpected end of data" else (0, error.start)
    return 0, None


class _Pieces(dict):
    """Of a byte-level tokenizer: id -> text, None for part of a character; filled as ids are met. Of another: always None."""

    def __init__(self, backend, skipped: frozenset[int]):
        super().__init__(dict.fromkeys(skipped, ""))
        self.backend = backend if isinstance(backend.decoder, decoders.ByteLevel) else None

    def __missing__(self, token: int) -> str | None:
        if self.backend is None:
            return None
        text = self.backend.decode([token], skip_special_tokens=False)      # "" where a model's vocabulary is padded
        self[token] = piece = None if "\ufffd" in text else text
        return piece


@functools.lru_cache(maxsize=4)
def _read_tokenizer(backend) -> tuple[frozenset[int], dict[int, int], tuple[_Pieces, _Pieces]]:
    """Of a `tokenizers.Tokenizer`: its special tokens' ids; its byte tokens (id -> byte) if its decoder makes bytes of them; the pieces of all
    tokens, and with the special ones left out."""
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    ids = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    ids.pop(None, None)
    bytes_of = {i: byte for i, byte in ids.items() if f"<0x{byte:02X}>" not in backend.decode([i], skip_special_tokens=False)}
    return special, bytes_of, (_Pieces(backend, frozenset()), _Pieces(backend, special))


def _demo() -> None:
    """A tokenizer of nothing but bytes, so that every character comes in pieces, and a stop string after them."""
    from types import SimpleNamespace

    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    stream = TextStream(SimpleNamespace(backend_tokenizer=backend), SamplingParams(stop=["the end"]), [], 100)
    for token in backend.encode("é🙂 then the end, never seen").ids:
        reason = stream.push(token)
        print(f"{backend.id_to_token(token):3s} certain {stream.text!r:12s} handed out {stream.take(final=reason is not None)!r}")
        if reason:
            break
    print(f"{reason} at {stream.stop_reason!r} after {stream.count} tokens")

    stream, word = StopString("a" * 4095 + "b"), "a" * 100_000
    began = time.perf_counter()
    stream.read(word, 0)
    print(f"a stop of 4,096 characters: {(time.perf_counter() - began) / len(word) * 1e9:.0f} ns a character that almost matches")


if __name__ == "__main__":
    _demo()
