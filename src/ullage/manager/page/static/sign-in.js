// A link of `ullage page` ends in #code=...: this part of an address is never sent to a server by itself.
function follow() {
  const match = location.hash.match(/^#code=([A-Za-z0-9_-]+)$/);
  const form = document.getElementById("sign-in");
  if (match && form) {
    history.replaceState(null, "", location.pathname);
    document.getElementById("token").required = false;
    document.getElementById("code").value = match[1];
    form.submit();
  }
}
addEventListener("hashchange", follow);
follow();
