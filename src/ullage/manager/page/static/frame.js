// A page that lost its connection finds its way back by itself, or, where its session has ended, to the form to sign in.
addEventListener("load", () => {
  const look = setInterval(async () => {
    if (!window.socket || window.socket.connected) return;
    const answer = await fetch("/_page/session").catch(() => null);
    if (answer?.status === 401) {
      clearInterval(look);
      location.assign("/sign-in");
    }
  }, 2000);
});
