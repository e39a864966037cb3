"""Errors of the assembler. Each is the caller's to repair and carries OpenAI's `param` and `code`.

AssemblyError
  DocumentError     a document is malformed, empty, or not to be found
  MessageError      a message has a shape, role or content part that cannot be rendered
  TemplateError     the chat template is missing, rejects the messages, or cannot be followed
"""


class AssemblyError(ValueError):
    """A chat request cannot become a prompt.

    Args:
        message: What was wrong and what was expected.
        param: The offending field, as a path into the request: ``documents[2].text``.
        code: A stable, machine-readable reason.
    """

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class DocumentError(AssemblyError):
    """A document is malformed, empty, or not to be found.

    `code` is ``document_not_found`` for an unknown reference (a 404), ``empty_document`` or
    ``invalid_document`` otherwise.
    """


class MessageError(AssemblyError):
    """A message has a shape, role or content part that cannot be rendered."""


class TemplateError(AssemblyError):
    """The chat template is missing, rejects the messages, or does what cannot be followed.

    `code` is ``chat_template_missing``, ``chat_template_rejected``,
    ``chat_template_unsupported`` or ``tokenizer_unsupported``.
    """

    def __init__(self, message: str, code: str, param: str = "messages") -> None:
        super().__init__(message, param, code)
